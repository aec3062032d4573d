"""Loading: every tensor of a checkpoint is used exactly once, or is left out by name and for a stated reason.

Invariants: nothing missing, nothing unexpected, no wrong shape, reported all together and by name before any data is
read. Quantised weights stay packed (`weights.forms`). Tensors already in the network's dtype stay memory-mapped; others
are converted one at a time.
Called by `llm` (through runtime) and by tests.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deepspan.config.model import ModelConfig, load_model_config
from deepspan.errors import WeightsError
from deepspan.model.drafter import DSpark
from deepspan.model.mtp import Mtp
from deepspan.model.network import DeepseekV4
from deepspan.ops.formats import Format
from deepspan.ops.registry import OpTable, reference_ops
from deepspan.weights.checkpoint import Checkpoint
from deepspan.weights.description import read_description
from deepspan.weights.folder import StoredTensors
from deepspan.weights.forms import Forms, canonical_scales, find_forms
from deepspan.weights.header import StoredTensor
from deepspan.weights.names import Place
from deepspan.weights.packed import PackedReader, install_packed
from deepspan.weights.placing import check_scales, expected, likely_cause, naming_of, num_stages, place_all, wanted_kind
from deepspan.weights.table import DraftKind, Storage, Table, TensorSpec

log = logging.getLogger(__name__)

FLOAT_DTYPES = frozenset(("BF16", "F16", "F32"))
INTEGER_DTYPES = frozenset(("I64", "I32"))
MAX_NAMES_IN_MESSAGE = 8
Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """network, drafter: parameters filled, gradients off. left_out: original name -> why it was not loaded.

    drafter: None if there are no draft stages, or they were not asked for.
    """

    config: ModelConfig
    network: DeepseekV4
    left_out: dict[str, str]
    drafter: DSpark | Mtp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A checkpoint whose headers fit its configuration. places: original name -> where it is stored.

    drafts: kind of the draft stages that are to be loaded.
    """

    places: Mapping[str, Place]
    forms: Forms
    drafts: DraftKind | None = None


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: OpTable | None = None,
    drafts: DraftKind | Literal["auto"] | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read `config.json` and the weights of a checkpoint folder.

    dtype: of activations and large matrices; ops: reference ops if None. drafts: kind of draft stages to load as
    well; auto loads what there is.
    Raises ConfigError or WeightsError naming the field, file or tensors at fault.
    """
    config = load_model_config(folder)
    checkpoint = Checkpoint(folder)
    fit = fit_headers(checkpoint, config, drafts)
    table, left_out = fit.forms.table, dict(fit.forms.left_out)
    network, drafter = build(checkpoint, config, fit, dtype=dtype, ops=ops or reference_ops(), drafts=fit.drafts)
    parts: list[torch.nn.Module] = [network, *([drafter] if drafter is not None else [])]
    reader = PackedReader(checkpoint, fit.places, fit.forms)
    reader.check_left_out()
    target = {name: value for part in parts for name, value in part.state_dict().items()}
    wanted = [name for name in table if name not in left_out]
    assert set(wanted) == set(target), sorted(set(wanted) ^ set(target))[:MAX_NAMES_IN_MESSAGE]
    state: dict[str, torch.Tensor] = {}
    for done, name in enumerate(wanted, start=1):
        stored = reader.read(name)
        if table[name].storage is Storage.INT64:
            check_expert_ids(name, stored, config.n_routed_experts)
        state[name] = stored.to(device=device, dtype=target[name].dtype)
        if progress is not None:
            progress(done, len(wanted))
    for part in parts:
        part.load_state_dict({name: state[name] for name in part.state_dict()}, assign=True)
        part.requires_grad_(False).eval()
    for name, reason in sorted(left_out.items()):
        log.info("tensor %s is not loaded: %s", name, reason)
    return LoadedModel(config=config, network=network, left_out=left_out, drafter=drafter)


def drafts_to_load(draft_method: str) -> DraftKind | Literal["auto"] | None:
    """What `drafts` of a loader is for a method of EngineConfig."""
    if draft_method in ("off", "auto"):
        return "auto" if draft_method == "auto" else None
    return DraftKind(draft_method)


def fit_headers(stored: StoredTensors, config: ModelConfig, drafts: DraftKind | Literal["auto"] | None = None) -> Fit:
    """Compare what is stored with what the configuration expects, before any data is read.

    Raises WeightsError with everything that does not fit, by name.
    """
    description = read_description(stored.folder, config.num_hidden_layers)
    naming = naming_of(list(stored), described=description is not None)
    places = canonical_scales(stored, place_all(list(stored), config, naming))
    kind = wanted_kind(places, drafts)
    table, left_out = expected(config, places, kind)
    forms = find_forms(stored, table, places, left_out, config, description)
    _check(stored, forms.table, places, config.n_routed_experts)
    check_block_scales(stored, places, forms)
    return Fit(places=places, forms=forms, drafts=kind)


def build(
    stored: StoredTensors, config: ModelConfig, fit: Fit, *, dtype: torch.dtype, ops: OpTable, drafts: DraftKind | None
) -> tuple[DeepseekV4, DSpark | Mtp | None]:
    """The network and its drafter on the meta device, quantised layers packed: shapes and dtypes of what is loaded."""
    with torch.device("meta"):
        network = DeepseekV4(config, ops, dtype)
        drafter: DSpark | Mtp | None = None
        if drafts is DraftKind.DSPARK:
            drafter = DSpark(config, ops, num_stages(fit.places), dtype)
        elif drafts is DraftKind.MTP:
            drafter = Mtp(config, ops, dtype)
    install_packed([network, *([drafter] if drafter is not None else [])], ops, stored, fit.places, fit.forms)
    return network, drafter


def differences(
    checkpoint: StoredTensors, table: Table, places: Mapping[str, Place], num_experts: int
) -> dict[str, list[str]]:
    """What does not fit, by kind: names that are missing, and what is unexpected or has a wrong shape or dtype."""
    found = {
        name: (table[name], checkpoint.tensors[place.key], place) for name, place in places.items() if name in table
    }
    return {
        "missing": [name for name in table if name not in places],
        "unexpected": [
            f"{name} ({checkpoint.tensors[place.key].file.name})" for name, place in places.items() if name not in table
        ],
        "wrong shape": [
            f"{name} has shape {list(shape)}, expected {list(spec.shape)} ({stored.file.name})"
            for name, (spec, stored, place) in found.items()
            if (shape := shape_at(stored, place, num_experts)) != spec.shape
        ],
        "wrong dtype": [
            f"{name} is stored as {stored.dtype}, expected {' or '.join(sorted(dtypes))} ({stored.file.name})"
            for name, (spec, stored, _) in found.items()
            if stored.dtype not in (dtypes := _dtypes_of(spec))
        ],
    }


def _check(checkpoint: StoredTensors, table: Table, places: dict[str, Place], num_experts: int) -> None:
    lists = differences(checkpoint, table, places, num_experts)
    problems = [f"{label}: {_some(names)}" for label, names in lists.items() if names]
    if problems:
        cause = likely_cause(lists["missing"], (name for name in places if name not in table))
        raise WeightsError(
            "; ".join(("the checkpoint does not fit its config.json", *([cause] if cause else []), *problems))
        )


def check_block_scales(checkpoint: StoredTensors, places: Mapping[str, Place], forms: Forms) -> None:
    """Raises WeightsError where scales of FP8 blocks are of two kinds."""
    scales = [
        (f"{module}.scale", checkpoint.tensors[places[f"{module}.scale"].key])
        for module, form in forms.formats.items()
        if form is Format.FP8 and ".experts." not in module
    ]
    check_scales({name: scale.dtype for name, scale in scales}, where={name: scale.file.name for name, scale in scales})


def _dtypes_of(spec: TensorSpec) -> frozenset[str]:
    return spec.dtypes or (INTEGER_DTYPES if spec.storage is Storage.INT64 else FLOAT_DTYPES)


def check_expert_ids(name: str, table: torch.Tensor, num_experts: int) -> None:
    lowest, highest = int(table.min()), int(table.max())
    if lowest < 0 or highest >= num_experts:
        raise WeightsError(f"{name} holds expert ids {lowest} to {highest}, n_routed_experts is {num_experts}")


def shape_at(stored: StoredTensor, place: Place, num_experts: int) -> tuple[int, ...]:
    """Shape of what lies at `place`; of the whole tensor if it is no stack of `num_experts` equal parts."""
    shape = stored.shape
    if place.expert is None:
        return shape
    if len(shape) != 3 or shape[0] != num_experts or shape[1] % place.num_parts:
        return shape
    return (shape[1] // place.num_parts, shape[2])


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMES_IN_MESSAGE])
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
