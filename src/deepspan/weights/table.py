"""Which tensors a checkpoint of a given configuration holds: names, shapes and how the release stores them.

The one statement of the file format: the loader checks files against it, `tiny` writes from it, and inspection counts
with it. Names are the released (original) ones; pure integers, no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from deepspan.config.model import OVERLAP_RATIO, ModelConfig


class Storage(Enum):
    """How the released quantised checkpoint stores a tensor; unquantised checkpoints store FP8 and FP4 ones as BF16."""

    FP8 = "fp8"  # e4m3 in 128 x 128 blocks with a scale each
    FP4 = "fp4"  # e2m1, two per byte, a scale per row and 32 columns
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """shape: unpacked, as the network sees it. unused: why the release never reads it, or empty.

    dtypes: safetensors names of the dtypes it may be stored in, where `weights.forms` has narrowed them.
    """

    shape: tuple[int, ...]
    storage: Storage
    unused: str = ""
    dtypes: frozenset[str] = frozenset()


Table = dict[str, TensorSpec]


class DraftKind(Enum):
    """What the `mtp.*` stages of a checkpoint are."""

    DSPARK = "dspark"
    MTP = "mtp"


def backbone_tensors(config: ModelConfig) -> Table:
    """Every tensor of the text network and, if the configuration has one, of the vision side."""
    hidden = config.hidden_size
    table: Table = {
        "embed.weight": _bf16(config.vocab_size, hidden),
        "head.weight": _bf16(config.vocab_size, hidden),
        "norm.weight": _bf16(hidden),
        **_head_merge(config, ""),
    }
    for layer in range(config.num_hidden_layers):
        is_hash = layer < config.num_hash_layers
        table |= _layer(config, f"layers.{layer}.", config.compress_ratios[layer], is_hash)
    if config.vision is not None:
        table |= dict(_vision(config))
    return table


def draft_tensors(config: ModelConfig, num_stages: int, kind: DraftKind) -> Table:
    """Every tensor under `mtp.`: `num_stages` layers without compression and what the method adds to them."""
    hidden = config.hidden_size
    table: Table = {}
    for stage in range(num_stages):
        prefix = f"mtp.{stage}."
        table |= _layer(config, prefix, ratio=0, is_hash=False)
        if kind is DraftKind.MTP:
            table |= {prefix + name: _fp8(hidden, hidden) for name in ("e_proj.weight", "h_proj.weight")}
            table |= {prefix + name: _bf16(hidden) for name in ("enorm.weight", "hnorm.weight", "norm.weight")}
            table |= _head_merge(config, prefix)
    if kind is DraftKind.DSPARK and num_stages:
        assert config.draft is not None
        first, last, rank = "mtp.0.", f"mtp.{num_stages - 1}.", config.draft.markov_rank
        table[first + "main_proj.weight"] = _fp8(hidden, hidden * len(config.draft.target_layer_ids))
        table[first + "main_norm.weight"] = _bf16(hidden)
        table[last + "norm.weight"] = _bf16(hidden)
        table |= _head_merge(config, last)
        for name in ("markov_w1", "markov_w2"):
            table[f"{last}markov_head.{name}.weight"] = _bf16(config.vocab_size, rank)
        table[last + "confidence_head.proj.weight"] = _bf16(1, hidden + rank)
    return table


def _layer(config: ModelConfig, prefix: str, ratio: int, is_hash: bool) -> Table:
    hidden, num_streams = config.hidden_size, config.hc_mult
    num_mixes = 2 * num_streams + num_streams**2
    table: Table = {}
    for half in ("attn", "ffn"):
        table[f"{prefix}{half}_norm.weight"] = _bf16(hidden)
        table[f"{prefix}hc_{half}_fn"] = _fp32(num_mixes, num_streams * hidden)
        table[f"{prefix}hc_{half}_base"] = _fp32(num_mixes)
        table[f"{prefix}hc_{half}_scale"] = _fp32(3)
    table |= _attention(config, prefix + "attn.", ratio)
    table |= _moe(config, prefix + "ffn.", is_hash)
    return table


def _attention(config: ModelConfig, prefix: str, ratio: int) -> Table:
    hidden, rank = config.hidden_size, config.q_lora_rank
    width = config.num_attention_heads * config.head_dim
    table: Table = {
        "wq_a.weight": _fp8(rank, hidden),
        "q_norm.weight": _bf16(rank),
        "wq_b.weight": _fp8(width, rank),
        "wkv.weight": _fp8(config.head_dim, hidden),
        "kv_norm.weight": _bf16(config.head_dim),
        "wo_a.weight": _fp8(config.o_groups * config.o_lora_rank, width // config.o_groups),
        "wo_b.weight": _fp8(hidden, config.o_groups * config.o_lora_rank),
        "attn_sink": _fp32(config.num_attention_heads),
    }
    if ratio:
        table |= _compressor(config, "compressor.", ratio, config.head_dim)
    if ratio == OVERLAP_RATIO:
        table["indexer.wq_b.weight"] = _fp8(config.index_n_heads * config.index_head_dim, rank)
        table["indexer.weights_proj.weight"] = _bf16(config.index_n_heads, hidden)
        table |= _compressor(config, "indexer.compressor.", ratio, config.index_head_dim)
    return {prefix + name: spec for name, spec in table.items()}


def _compressor(config: ModelConfig, prefix: str, ratio: int, dim: int) -> Table:
    width = 2 * dim if ratio == OVERLAP_RATIO else dim
    return {
        prefix + "ape": _fp32(ratio, width),
        prefix + "wkv.weight": _bf16(width, config.hidden_size),
        prefix + "wgate.weight": _bf16(width, config.hidden_size),
        prefix + "norm.weight": _bf16(dim),
    }


def _moe(config: ModelConfig, prefix: str, is_hash: bool) -> Table:
    hidden, inter, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    table: Table = {prefix + "gate.weight": _bf16(num_experts, hidden)}
    if is_hash:
        table[prefix + "gate.tid2eid"] = TensorSpec(
            shape=(config.vocab_size, config.num_experts_per_tok), storage=Storage.INT64
        )
    if config.vision is not None:
        table[prefix + "gate.bias_vl"] = _fp32(num_experts)
    if not is_hash:
        table[prefix + "gate.bias"] = _fp32(num_experts)
    elif config.vision is not None:
        table[prefix + "gate.bias"] = TensorSpec(
            shape=(num_experts,), storage=Storage.FP32, unused="hash layers choose by table and by bias_vl"
        )
    for name, shape in (("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))):
        table[f"{prefix}shared_experts.{name}.weight"] = _fp8(*shape)
        for expert in range(num_experts):
            table[f"{prefix}experts.{expert}.{name}.weight"] = TensorSpec(shape=shape, storage=Storage.FP4)
    return table


def _head_merge(config: ModelConfig, prefix: str) -> Table:
    num_streams = config.hc_mult
    return {
        prefix + "hc_head_fn": _fp32(num_streams, num_streams * config.hidden_size),
        prefix + "hc_head_base": _fp32(num_streams),
        prefix + "hc_head_scale": _fp32(1),
    }


def _vision(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    vision, hidden = config.vision, config.hidden_size
    assert vision is not None
    dim = vision.dim
    yield "vision.patch_embed.proj.weight", _bf16(dim, 3 * vision.patch_size**2)
    yield "vision.patch_embed.proj.bias", _bf16(dim)
    for block in range(vision.n_layers):
        prefix = f"vision.blocks.{block}."
        yield prefix + "norm1.weight", _bf16(dim)
        yield prefix + "norm2.weight", _bf16(dim)
        yield prefix + "attn.wqkv.weight", _bf16(3 * dim, dim)
        yield prefix + "attn.wqkv.bias", _bf16(3 * dim)
        yield prefix + "attn.wo.weight", _bf16(dim, dim)
        yield prefix + "attn.wo.bias", _bf16(dim)
        yield prefix + "mlp.w1.weight", _bf16(2 * vision.inter_dim, dim)
        yield prefix + "mlp.w2.weight", _bf16(dim, vision.inter_dim)
    yield "vision.norm.weight", _bf16(dim)
    yield "aligner.w1.weight", _bf16(hidden, dim * vision.downsample_ratio**2)
    yield "aligner.w1.bias", _bf16(hidden)
    yield "aligner.w2.weight", _bf16(hidden, hidden)
    yield "aligner.w2.bias", _bf16(hidden)
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        yield name, _bf16(hidden)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, storage=Storage.BF16)


def _fp32(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, storage=Storage.FP32)


def _fp8(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, storage=Storage.FP8)
