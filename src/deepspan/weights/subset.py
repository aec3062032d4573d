"""The first layers and a few experts of a checkpoint, in its own formats, as a checkpoint of its own: for debugging.

Invariants: what is kept is kept byte by byte, but for the rows of routers that belong to experts that are gone and hash
tables, which name kept experts only; the configuration fits. The result answers nonsense, by the same code as the
whole. Called by `weights.plan`.

Shapes: V vocabulary, A experts per token.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspan.errors import ConfigError
from deepspan.weights.load import check_expert_ids
from deepspan.weights.recode import Part, kept
from deepspan.weights.source import Piece, Source
from deepspan.weights.table import DraftKind
from deepspan.weights.writer import TensorHeader

_IN_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.")
_EXPERT = re.compile(r".*\.ffn\.experts\.(\d+)\.")
_ROUTER = re.compile(r".*\.ffn\.gate\.(weight|bias|bias_vl)")
_PER_LAYER_FIELDS = ("layer_types", "mlp_layer_types")
_STAGE_COUNTS = ("num_nextn_predict_layers", "n_mtp_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """How many of the first layers and experts are kept, and whether draft stages are."""

    layers: int
    experts: int
    keep_drafts: bool = False


def cut(source: Source, subset: Subset) -> list[Part]:
    """Parts of the smaller checkpoint. Raises ConfigError naming the option that the checkpoint cannot give."""
    _check(source, subset)
    return [_part(source, piece, subset) for piece in source.pieces if _is_kept(piece.name, subset)]


def subset_config(source: Source, subset: Subset) -> dict[str, Any]:
    """Contents of its `config.json`."""
    _check(source, subset)
    config, raw = source.config, dict(source.raw)
    keeps_drafts = subset.keep_drafts and source.num_stages > 0
    tail = raw["compress_ratios"][config.num_hidden_layers :] if keeps_drafts else []
    raw |= {
        "num_hidden_layers": subset.layers,
        "compress_ratios": [*config.compress_ratios[: subset.layers], *tail],
        "n_routed_experts": subset.experts,
        "num_experts_per_tok": _num_active(source, subset),
        "num_hash_layers": min(config.num_hash_layers, subset.layers),
    }
    raw |= {name: raw[name][: subset.layers] for name in _PER_LAYER_FIELDS if isinstance(raw.get(name), list)}
    if not keeps_drafts:
        raw |= {name: 0 for name in _STAGE_COUNTS if name in raw}
        return {name: value for name, value in raw.items() if not name.startswith("dspark_")}
    if config.draft is not None:
        raw["dspark_target_layer_ids"] = _targets(config.draft.target_layer_ids, subset.layers)
    return raw


def subset_remarks(source: Source, subset: Subset) -> list[str]:
    """What is not as in the whole checkpoint though nobody asked for it, by the name of its field."""
    config, remarks = source.config, []
    if (active := _num_active(source, subset)) < config.num_experts_per_tok:
        remarks.append(f"num_experts_per_tok is {active} instead of {config.num_experts_per_tok}")
    if source.num_stages and not subset.keep_drafts:
        remarks.append(f"{source.num_stages} draft stages (mtp.*) are left out; --keep-drafts keeps them")
    if config.draft is not None and subset.keep_drafts:
        was = list(config.draft.target_layer_ids)
        if (targets := _targets(config.draft.target_layer_ids, subset.layers)) != was:
            remarks.append(f"dspark_target_layer_ids is {targets} instead of {was}")
    return remarks


def _check(source: Source, subset: Subset) -> None:
    config = source.config
    for option, found, most in (
        ("--layers", subset.layers, config.num_hidden_layers),
        ("--experts", subset.experts, config.n_routed_experts),
    ):
        if not 1 <= found <= most:
            raise ConfigError(f"{option} must be from 1 to {most}, which the checkpoint has, found {found}")
    if subset.keep_drafts and not source.num_stages:
        raise ConfigError("--keep-drafts was given, and the checkpoint has no draft stages (mtp.*)")
    if subset.keep_drafts and source.draft_kind is DraftKind.DSPARK:
        assert config.draft is not None, "the loader has checked it"
        if (needed := len(config.draft.target_layer_ids)) > subset.layers:
            raise ConfigError(
                f"draft stages look at {needed} layers, so --keep-drafts needs --layers {needed} or more, found "
                f"{subset.layers}"
            )


def _targets(layers: tuple[int, ...], num_layers: int) -> list[int]:
    """Layers that draft stages look at: the same if they are there, otherwise as many of the last."""
    if max(layers) < num_layers:
        return list(layers)
    return list(range(num_layers))[-len(layers) :]


def _num_active(source: Source, subset: Subset) -> int:
    return min(source.config.num_experts_per_tok, subset.experts)


def _is_kept(name: str, subset: Subset) -> bool:
    place, expert = _IN_LAYER.match(name), _EXPERT.match(name)
    if expert is not None and int(expert[1]) >= subset.experts:
        return False
    if place is None:
        return True
    return subset.keep_drafts if place[1] == "mtp" else int(place[2]) < subset.layers


def _part(source: Source, piece: Piece, subset: Subset) -> Part:
    """Routers lose the rows of experts that are gone."""
    part, name = kept(source, piece), piece.name
    is_table = name.endswith(".ffn.gate.tid2eid")
    if not is_table and _ROUTER.fullmatch(name) is None:
        return part
    header = piece.headers[name]
    active = _num_active(source, subset)
    shape = (header.shape[0], active) if is_table else (subset.experts, *header.shape[1:])

    def make() -> dict[str, Tensor]:
        tensor = source.stored(piece)[name]
        if not is_table:
            return {name: tensor[: subset.experts]}
        check_expert_ids(name, tensor, source.config.n_routed_experts)
        return {name: remapped(tensor, subset.experts, active)}

    return Part(headers={name: TensorHeader(dtype=header.dtype, shape=shape)}, labels=part.labels, make=make)


def remapped(table_VA: Tensor, num_experts: int, num_active: int) -> Tensor:
    """A hash table over the first experts: `num_active` different ones in each row.

    Those of a row that are kept stay, before all others; an id that is gone becomes its rest, or the next that is free.
    """
    order = (table_VA >= num_experts).to(torch.int8).argsort(dim=1, stable=True)
    wanted = table_VA.gather(1, order)[:, :num_active].long() % num_experts
    taken = torch.zeros(len(wanted), num_experts, dtype=torch.bool)
    for column in wanted.unbind(1):
        while (rows := taken[torch.arange(len(column)), column].nonzero()[:, 0]).numel():
            column[rows] = (column[rows] + 1) % num_experts
        taken[torch.arange(len(column)), column] = True
    return wanted.to(table_VA.dtype)
