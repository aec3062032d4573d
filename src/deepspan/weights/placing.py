"""Which original names a checkpoint's stored names stand for, and which names a configuration expects.

Names only: no headers, no torch. Invariant: every stored name has a place, or is refused by name. Used by
`weights.load` and by `weights.inventory`.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Literal

from deepspan.config.model import ModelConfig
from deepspan.errors import WeightsError
from deepspan.weights.names import Place, canonical_names, is_transformers_naming, locate, originals_at
from deepspan.weights.table import DraftKind, Table, backbone_tensors, draft_tensors


class Naming(Enum):
    """Whose names a checkpoint's tensors have."""

    ORIGINAL = "original"
    TRANSFORMERS = "transformers"
    DESCRIBED = "described"  # an export with a description, whose names are those of a serving program


def naming_of(keys: Collection[str], *, described: bool) -> Naming:
    if described:
        return Naming.DESCRIBED
    return Naming.TRANSFORMERS if is_transformers_naming(iter(keys)) else Naming.ORIGINAL


def place_all(keys: Collection[str], config: ModelConfig, naming: Naming) -> dict[str, Place]:
    """Original name -> place, for everything the checkpoint holds. Raises WeightsError for names of neither scheme."""
    places: dict[str, Place] = {}
    for key in keys:
        for name, place in places_of(key, naming, config.n_routed_experts, config.num_hidden_layers).items():
            if name in places:
                raise WeightsError(f"tensors {places[name].key} and {key} both hold {name}")
            places[name] = place
    return places


def places_of(key: str, naming: Naming, num_experts: int, num_layers: int) -> dict[str, Place]:
    """Original name -> place, for what lies under one stored name. Raises WeightsError if that is none."""
    if naming is Naming.DESCRIBED:
        names = canonical_names(key, num_layers)
        if len(names) > 1:
            raise WeightsError(f"tensor {key} holds {' and '.join(names)} in one; expected one tensor each")
        return {names[0]: Place(key=key)}
    if naming is Naming.TRANSFORMERS:
        return _renamed(key, num_experts)
    return {re.sub(r"^model\.(?=(vision|aligner)\.|image_)", "", key): Place(key=key)}


def _renamed(key: str, num_experts: int) -> dict[str, Place]:
    weight = key.removesuffix("_scale_inv") if key.endswith(".weight_scale_inv") else key
    try:
        originals = originals_at(weight, num_experts)
    except KeyError:
        raise WeightsError(f"unexpected tensor {key}: not a transformers name of DeepSeek-V4{_mixed(key)}") from None
    return {name + key.removeprefix(weight): replace(locate(name), key=key) for name in originals}


def _mixed(key: str) -> str:
    try:
        renamed = locate(key).key
    except KeyError:
        return ""
    return f"; it is the released name of {renamed}, so the files come from two conversions"


# --- what is expected


def num_stages(names: Iterable[str]) -> int:
    """Draft stages of a checkpoint, counted from its names, never read from a field. Raises WeightsError for gaps."""
    stages = {int(match[1]) for name in names if (match := re.match(r"mtp\.(\d+)\.", name))}
    if stages != set(range(len(stages))):
        raise WeightsError(f"draft stages must be numbered from 0 without gaps, found mtp.{sorted(stages)}")
    return len(stages)


def draft_kind(names: Collection[str]) -> DraftKind:
    """What the draft stages of a checkpoint are, told by the one module that only plain MTP has."""
    return DraftKind.MTP if "mtp.0.e_proj.weight" in names else DraftKind.DSPARK


def wanted_kind(names: Collection[str], drafts: DraftKind | Literal["auto"] | None) -> DraftKind | None:
    """What is to be loaded of the draft stages; auto: whatever there is. Raises WeightsError for gaps."""
    if drafts != "auto":
        return drafts
    return draft_kind(names) if num_stages(names) else None


def expected(config: ModelConfig, names: Collection[str], drafts: DraftKind | None) -> tuple[Table, dict[str, str]]:
    """What must be there, and which of it is not loaded: original name -> why."""
    table = backbone_tensors(config)
    left_out = {name: spec.unused for name, spec in table.items() if spec.unused}
    stages = num_stages(names)
    if not stages and drafts is not None:
        raise WeightsError(f"{drafts.value} drafting was asked for, and the checkpoint has no draft stages (mtp.*)")
    if stages:
        kind = draft_kind(names)
        if kind is DraftKind.DSPARK and config.draft is None:
            raise WeightsError("the checkpoint has DSpark draft stages (mtp.*), config.json has no dspark_block_size")
        draft = draft_tensors(config, stages, kind)
        if drafts is DraftKind.MTP and kind is drafts and stages != 1:
            raise WeightsError(f"plain MTP is served with one stage, the checkpoint has {stages}; turn drafting off")
        if drafts is None:
            left_out |= dict.fromkeys(draft, "drafting is off")
        elif drafts is not kind:
            raise WeightsError(f"{drafts.value} drafting was asked for, the checkpoint's draft stages are {kind.value}")
        # Some exports give each stage copies of the network's own embedding and head.
        copies = [name for name in names if re.fullmatch(r"mtp\.\d+\.(embed|emb\.tok_emb|head)\.weight", name)]
        left_out |= dict.fromkeys(copies, "a copy: draft stages share those of the network")
        table |= draft | dict.fromkeys(copies, table["embed.weight"])
    return table, left_out


def likely_cause(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """A remark about two releases in one folder, if that is what names that do not fit look like; otherwise empty."""
    missing, unexpected = list(missing), list(unexpected)
    for names, other, there, said in (
        (unexpected, missing, "hold vision tensors", "describes a text model"),
        (missing, unexpected, "hold no vision tensors", "describes a vision model"),
    ):
        whole = any(name.startswith("vision.") for name in names)
        if whole and not other and all(_is_vision(name) for name in names):
            return f"the files {there} and config.json {said}: they come from two releases"
    return ""


def _is_vision(name: str) -> bool:
    hash_bias = name.endswith(".ffn.gate.bias")  # hash layers have it in the vision release only
    return name.startswith(("vision.", "aligner.", "image_")) or name.endswith(".gate.bias_vl") or hash_bias


def check_scales(dtypes: Mapping[str, str], where: Mapping[str, str]) -> None:
    """Block scales of one release have one dtype; of two in one folder, shards come from two releases.

    dtypes: of the scales of dense FP8 layers, by name; draft stages apart. where: file of each. Raises WeightsError.
    """
    first: dict[tuple[bool, str], str] = {}
    for name, dtype in dtypes.items():
        first.setdefault((name.startswith("mtp."), dtype), name)
    for is_draft in (False, True):
        found = [(name, dtype) for (of_draft, dtype), name in first.items() if of_draft is is_draft]
        if len(found) > 1:
            said = " and ".join(f"{name} is {dtype} ({where[name]})" for name, dtype in found)
            raise WeightsError(f"block scales are of two kinds, as if files came from two releases: {said}")
