"""The two naming schemes of checkpoints, related by one table read in both directions.

Original (released) names are the project's own; transformers names are those of its `DeepseekV4ForCausalLM`, which
stacks the experts of a layer into two tensors. Vision tensors keep their names, with or without a leading `model.`.
Quantised exports may use names of the program that serves them; `canonical_names` brings those back.
Invariants: `originals_at(locate(name).key)` contains `name`, and every original name has exactly one place;
`canonical_names` of a canonical name is that name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_GLOBAL = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("head.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("hc_head_fn", "model.hc_head.hc_fn"),
    ("hc_head_base", "model.hc_head.hc_base"),
    ("hc_head_scale", "model.hc_head.hc_scale"),
)
_COMPRESSOR = (("wkv.weight", "kv_proj.weight"), ("wgate.weight", "gate_proj.weight"), ("ape", "position_bias"))
_COMPRESSORS = tuple(
    (f"attn.{original}.{part}", f"self_attn.{renamed}.{renamed_part}")
    for original, renamed in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer"))
    for part, renamed_part in (*_COMPRESSOR, ("norm.weight", "kv_norm.weight"))
)
_LAYER = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    *((f"hc_{half}_{part}", f"{half}_hc.{part}") for half in ("attn", "ffn") for part in ("fn", "base", "scale")),
    ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    ("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    ("attn.attn_sink", "self_attn.sinks"),
    *_COMPRESSORS,
    ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    ("attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"),
    ("ffn.gate.weight", "mlp.gate.weight"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.bias_vl", "mlp.gate.bias_vl"),
    ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
)
# One stacked tensor [E, rows, columns] per entry; the parts lie one after the other along the rows.
_STACKED = (("mlp.experts.gate_up_proj", ("w1", "w3")), ("mlp.experts.down_proj", ("w2",)))

_TO_TRANSFORMERS = dict(_GLOBAL), dict(_LAYER)
_TO_ORIGINAL = {new: old for old, new in _GLOBAL}, {new: old for old, new in _LAYER}
_ORIGINAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TRANSFORMERS_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_VISION = re.compile(r"(?:model\.)?((?:vision|aligner)\..+|image_(?:start|end|newline|pad))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies: a stored tensor, or for stacked experts a part of one.

    expert: index along the first dimension, or None for the whole tensor.
    part, num_parts: which equal share of the rows of that expert.
    """

    key: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


def locate(original: str) -> Place:
    """Place of an original name in a checkpoint with transformers names. Raises KeyError if it has none (`mtp.*`)."""
    if original in _TO_TRANSFORMERS[0]:
        return Place(key=_TO_TRANSFORMERS[0][original])
    if _VISION.fullmatch(original):
        return Place(key=original)
    match = _ORIGINAL_LAYER.fullmatch(original)
    if match is None:
        raise KeyError(original)
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    if expert := _EXPERT.fullmatch(rest):
        for stacked, parts in _STACKED:
            if expert[2] in parts:
                part = parts.index(expert[2])
                return Place(key=prefix + stacked, expert=int(expert[1]), part=part, num_parts=len(parts))
    return Place(key=prefix + _TO_TRANSFORMERS[1][rest])


def originals_at(key: str, num_experts: int) -> list[str]:
    """Original names stored under a transformers key (several for stacked experts). Raises KeyError if unknown."""
    if key in _TO_ORIGINAL[0]:
        return [_TO_ORIGINAL[0][key]]
    if vision := _VISION.fullmatch(key):
        return [vision[1]]
    match = _TRANSFORMERS_LAYER.fullmatch(key)
    if match is None:
        raise KeyError(key)
    prefix, rest = f"layers.{match[1]}.", match[2]
    for stacked, parts in _STACKED:
        if rest == stacked:
            return [f"{prefix}ffn.experts.{e}.{part}.weight" for e in range(num_experts) for part in parts]
    return [prefix + _TO_ORIGINAL[1][rest]]


def is_transformers_naming(keys: Iterator[str]) -> bool:
    """Whether a checkpoint's keys follow transformers (told by any text tensor that only it would name so)."""
    return any(key in _TO_ORIGINAL[0] or _TRANSFORMERS_LAYER.fullmatch(key) for key in keys)


# Names of serving programs, part by part of the dotted name: what stands where decides, so that nothing is renamed
# twice (`hc_head_fn` is no head, `ffn_norm` no ffn). A fused module stands for several.
_RENAMED_ROOT = {"embed_tokens": "embed", "lm_head": "head"}
_RENAMED_BLOCK = {
    "self_attn": "attn",
    "mlp": "ffn",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_RENAMED_PROJECTION = {
    "gate_proj": ("w1",),
    "up_proj": ("w3",),
    "down_proj": ("w2",),
    "gate_up_proj": ("w1", "w3"),
    "wqa_wkv": ("wq_a", "wkv"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "e_score_correction_bias": ("bias",),
}
_RENAMEABLE = re.compile(
    r"ffn\.(experts\.\d+|shared_experts)\.(gate|up|down|gate_up)_proj\..+|attn\.(fused_)?wqa_wkv\..+|"
    r"ffn\.gate\.e_score_correction_bias"
)


def canonical_names(name: str, num_layers: int) -> list[str]:
    """Original names of a tensor that a quantised export names in its own way: several for a fused module.

    Prefixes `language_model.` and `model.` are stripped once each; layers from `num_layers` on are draft stages.
    """
    parts = name.removeprefix("language_model.").removeprefix("model.").split(".")
    parts[0] = _RENAMED_ROOT.get(parts[0], parts[0])
    if parts[0] not in ("layers", "mtp") or len(parts) < 3 or not parts[1].isdecimal():
        return [".".join(parts)]
    stage = int(parts[1]) - num_layers
    if parts[0] == "layers" and (stage >= 0 or parts[2] == "mtp_block"):
        parts[:2] = ["mtp", str(stage if stage >= 0 else int(parts[1]))]
    if parts[2] == "mtp_block":
        del parts[2]
    parts[2] = _RENAMED_BLOCK.get(parts[2], parts[2])
    prefix, rest = ".".join(parts[:2]), ".".join(parts[2:])
    if not _RENAMEABLE.fullmatch(rest):
        return [f"{prefix}.{rest}"]
    (place,) = (i for i, part in enumerate(parts) if part in _RENAMED_PROJECTION)
    return [".".join((*parts[:place], new, *parts[place + 1 :])) for new in _RENAMED_PROJECTION[parts[place]]]
