"""Loading: every tensor of a checkpoint is used exactly once, or is left out by name and for a stated reason.

Invariants: nothing missing, nothing unexpected, no wrong shape, reported all together and by name before any data is
read. Quantised weights stay packed (`weights.forms`). Tensors already in the network's dtype stay memory-mapped; others
are converted one at a time.
Called by `llm` (through runtime) and by tests.
"""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepspan.config.model import ModelConfig, load_model_config
from deepspan.errors import WeightsError
from deepspan.model.drafter import DSpark
from deepspan.model.network import DeepseekV4
from deepspan.ops.registry import OpTable, reference_ops
from deepspan.weights.checkpoint import Checkpoint, StoredTensor
from deepspan.weights.description import read_description
from deepspan.weights.forms import canonical_scales, find_forms
from deepspan.weights.names import Place, canonical_names, is_transformers_naming, locate, originals_at
from deepspan.weights.packed import PackedReader
from deepspan.weights.table import DraftKind, Storage, Table, TensorSpec, backbone_tensors, draft_tensors

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
    drafter: DSpark | None = None


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: OpTable | None = None,
    drafts: DraftKind | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read `config.json` and the weights of a checkpoint folder.

    dtype: of activations and large matrices; ops: reference ops if None. drafts: kind of draft stages to load as well.
    Raises ConfigError or WeightsError naming the field, file or tensors at fault.
    """
    config = load_model_config(folder)
    checkpoint = Checkpoint(folder)
    description = read_description(checkpoint.folder, config.num_hidden_layers)
    places = canonical_scales(checkpoint, _place_all(checkpoint, config, described=description is not None))
    table, left_out = _expected(config, places, drafts)
    forms = find_forms(checkpoint, table, places, left_out, config, description)
    table, left_out = forms.table, dict(forms.left_out)
    _check(checkpoint, table, places, config.n_routed_experts)

    ops = ops or reference_ops()
    with torch.device("meta"):
        network = DeepseekV4(config, ops, dtype)
        drafter = DSpark(config, ops, num_stages(places), dtype) if drafts is DraftKind.DSPARK else None
    parts: list[torch.nn.Module] = [network, *([drafter] if drafter is not None else [])]
    reader = PackedReader(checkpoint, places, forms)
    reader.check_left_out()
    reader.install(parts, ops)
    target = {name: value for part in parts for name, value in part.state_dict().items()}
    wanted = [name for name in table if name not in left_out]
    assert set(wanted) == set(target), sorted(set(wanted) ^ set(target))[:MAX_NAMES_IN_MESSAGE]
    state: dict[str, torch.Tensor] = {}
    for done, name in enumerate(wanted, start=1):
        stored = reader.read(name)
        if table[name].storage is Storage.INT64:
            _check_expert_ids(name, stored, config.n_routed_experts)
        state[name] = stored.to(device=device, dtype=target[name].dtype)
        if progress is not None:
            progress(done, len(wanted))
    for part in parts:
        part.load_state_dict({name: state[name] for name in part.state_dict()}, assign=True)
        part.requires_grad_(False).eval()
    for name, reason in sorted(left_out.items()):
        log.info("tensor %s is not loaded: %s", name, reason)
    return LoadedModel(config=config, network=network, left_out=left_out, drafter=drafter)


def num_stages(names: Iterable[str]) -> int:
    """Draft stages of a checkpoint, counted from its names, never read from a field. Raises WeightsError for gaps."""
    stages = {int(match[1]) for name in names if (match := re.match(r"mtp\.(\d+)\.", name))}
    if stages != set(range(len(stages))):
        raise WeightsError(f"draft stages must be numbered from 0 without gaps, found mtp.{sorted(stages)}")
    return len(stages)


def _place_all(checkpoint: Checkpoint, config: ModelConfig, *, described: bool) -> dict[str, Place]:
    """Original name -> place, for everything the checkpoint holds. Raises WeightsError for names of neither scheme.

    described: whether it is an export with a description, whose names are then those of a serving program.
    """
    renamed = not described and is_transformers_naming(iter(checkpoint))
    places: dict[str, Place] = {}
    for key in checkpoint:
        if described:
            stored = _canonically_at(key, config)
        else:
            stored = _stored_at(key, config) if renamed else {_strip_vision_prefix(key): Place(key=key)}
        for name, place in stored.items():
            if name in places:
                raise WeightsError(f"tensors {places[name].key} and {key} both hold {name}")
            places[name] = place
    return places


def _stored_at(key: str, config: ModelConfig) -> dict[str, Place]:
    """Original name -> place, for what lies under one transformers name."""
    weight = key.removesuffix("_scale_inv") if key.endswith(".weight_scale_inv") else key
    try:
        originals = originals_at(weight, config.n_routed_experts)
    except KeyError:
        raise WeightsError(f"unexpected tensor {key}: not a transformers name of DeepSeek-V4") from None
    return {name + key.removeprefix(weight): replace(locate(name), key=key) for name in originals}


def _canonically_at(key: str, config: ModelConfig) -> dict[str, Place]:
    names = canonical_names(key, config.num_hidden_layers)
    if len(names) > 1:
        raise WeightsError(f"tensor {key} holds {' and '.join(names)} in one; expected one tensor each")
    return {names[0]: Place(key=key)}


def _strip_vision_prefix(key: str) -> str:
    return re.sub(r"^model\.(?=(vision|aligner)\.|image_)", "", key)


def _expected(config: ModelConfig, names: Iterable[str], drafts: DraftKind | None) -> tuple[Table, dict[str, str]]:
    """What must be there, and which of it is not loaded."""
    table = backbone_tensors(config)
    left_out = {name: spec.unused for name, spec in table.items() if spec.unused}
    stages = num_stages(names)
    if not stages and drafts is not None:
        raise WeightsError(f"{drafts.value} drafting was asked for, and the checkpoint has no draft stages (mtp.*)")
    if stages:
        kind = DraftKind.MTP if "mtp.0.e_proj.weight" in names else DraftKind.DSPARK
        if kind is DraftKind.DSPARK and config.draft is None:
            raise WeightsError("the checkpoint has DSpark draft stages (mtp.*), config.json has no dspark_block_size")
        draft = draft_tensors(config, stages, kind)
        if drafts is None:
            left_out |= dict.fromkeys(draft, "drafting is off")
        elif drafts is not kind:
            raise WeightsError(f"{drafts.value} drafting was asked for, the checkpoint's draft stages are {kind.value}")
        # Some exports give each stage copies of the network's own embedding and head.
        copies = [name for name in names if re.fullmatch(r"mtp\.\d+\.(embed|emb\.tok_emb|head)\.weight", name)]
        left_out |= dict.fromkeys(copies, "a copy: draft stages share those of the network")
        table |= draft | dict.fromkeys(copies, table["embed.weight"])
    return table, left_out


def _check(checkpoint: Checkpoint, table: Table, places: dict[str, Place], num_experts: int) -> None:
    found = {
        name: (table[name], checkpoint.tensors[place.key], place) for name, place in places.items() if name in table
    }
    lists = {
        "missing": [name for name in table if name not in places],
        "unexpected": [name for name in places if name not in table],
        "wrong shape": [
            f"{name} has shape {list(shape)}, expected {list(spec.shape)} ({stored.file.name})"
            for name, (spec, stored, place) in found.items()
            if (shape := _shape_at(stored, place, num_experts)) != spec.shape
        ],
        "wrong dtype": [
            f"{name} is stored as {stored.dtype}, expected {' or '.join(sorted(dtypes))} ({stored.file.name})"
            for name, (spec, stored, _) in found.items()
            if stored.dtype not in (dtypes := _dtypes_of(spec))
        ],
    }
    problems = [f"{label}: {_some(names)}" for label, names in lists.items() if names]
    if problems:
        raise WeightsError(f"the checkpoint does not fit its config.json; {'; '.join(problems)}")


def _dtypes_of(spec: TensorSpec) -> frozenset[str]:
    return spec.dtypes or (INTEGER_DTYPES if spec.storage is Storage.INT64 else FLOAT_DTYPES)


def _check_expert_ids(name: str, table: torch.Tensor, num_experts: int) -> None:
    lowest, highest = int(table.min()), int(table.max())
    if lowest < 0 or highest >= num_experts:
        raise WeightsError(f"{name} holds expert ids {lowest} to {highest}, n_routed_experts is {num_experts}")


def _shape_at(stored: StoredTensor, place: Place, num_experts: int) -> tuple[int, ...]:
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
