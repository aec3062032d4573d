"""The model's configuration, read strictly from the released `config.json` into frozen records.

Owns the knowledge of which fields the file has, which of them matter, and which combinations cannot be served. Every
number that shapes the network comes from the file; there is no default taken from Flash. Field names are those of the
file. Called by `weights`, `model`, `image`, `engine` and `cli`; never imports torch.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspan.config.fields import Fields
from deepspan.config.quantisation import QuantisationConfig, quantisation_config
from deepspan.errors import ConfigError

log = logging.getLogger(__name__)

MODEL_TYPE = "deepseek_v4"
SUPPORTED_ARCHITECTURES = ("DeepseekV4ForCausalLM",)
OVERLAP_RATIO = 4  # the ratio whose compressor looks back one group and whose entries the indexer selects

# Fields of the file that say nothing about the arithmetic served here.
IGNORED_FIELDS = frozenset(
    """architectures attention_bias attention_dropout auto_map bos_token_id dtype eos_token_id hidden_act
    initializer_range max_position_embeddings model_type pad_token_id tie_word_embeddings
    topk_method torch_dtype transformers_version use_cache norm_topk_prob scoring_func num_key_value_heads
    n_shared_experts num_nextn_predict_layers n_mtp_layers output_router_logits router_aux_loss_coef
    layer_types mlp_layer_types _name_or_path""".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of compressed layers (YaRN) and of window layers (plain `theta`)."""

    theta: float
    compress_theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Vision tower, aligner and image preprocessing (fields `vision_*` of the file)."""

    n_layers: int
    dim: int
    n_heads: int
    inter_dim: int
    patch_size: int
    downsample_ratio: int
    max_n_token: int
    min_pixels: int
    max_wh_ratio: int
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """DSpark draft stages. How many there are is counted from the checkpoint, never read from a field."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that shapes the network.

    compress_ratios: one of {0, 4, other positive ratio} per backbone layer; entries for draft stages are cut off.
    num_draft_ratios: how many were cut off, which estimates take for the number of stages; loaders count what is there.
    vision: None for a text-only checkpoint. draft: None if the file has no DSpark fields.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    num_draft_ratios: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope: RopeConfig
    bos_token_id: int
    eos_token_id: int
    max_position_embeddings: int
    torch_dtype: str
    vision: VisionConfig | None
    draft: DraftConfig | None
    quantisation: QuantisationConfig

    def ratios_in_use(self) -> tuple[int, ...]:
        """Distinct positive compress ratios, ascending."""
        return tuple(sorted({ratio for ratio in self.compress_ratios if ratio}))


def load_model_config(path: str | Path) -> ModelConfig:
    """Read `config.json` at `path` (the file or the folder that holds it).

    Raises ConfigError naming the file or the field.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config.json at {file}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds {type(raw).__name__}, expected a JSON object")
    return parse_model_config(raw)


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Validate the contents of a released `config.json`.

    Raises ConfigError naming the field if the model is another one, a field is missing or has the wrong type, or the
    values cannot belong together. Unknown fields are reported in the log: they may change the model's meaning.
    """
    _check_identity(raw)
    fields = Fields(raw)
    num_layers = fields.positive("num_hidden_layers")
    ratios = _compress_ratios(fields, num_layers)
    config = ModelConfig(
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=fields.positive("num_attention_heads"),
        head_dim=fields.positive("head_dim"),
        qk_rope_head_dim=fields.positive("qk_rope_head_dim"),
        q_lora_rank=fields.positive("q_lora_rank"),
        o_lora_rank=fields.positive("o_lora_rank"),
        o_groups=fields.positive("o_groups"),
        sliding_window=fields.positive("sliding_window"),
        compress_ratios=ratios[:num_layers],
        num_draft_ratios=len(ratios) - num_layers,
        index_n_heads=fields.positive("index_n_heads"),
        index_head_dim=fields.positive("index_head_dim"),
        index_topk=fields.positive("index_topk"),
        moe_intermediate_size=fields.positive("moe_intermediate_size"),
        n_routed_experts=fields.positive("n_routed_experts"),
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        routed_scaling_factor=fields.above("routed_scaling_factor", 0),
        num_hash_layers=fields.natural("num_hash_layers"),
        swiglu_limit=fields.above("swiglu_limit", 0),
        hc_mult=fields.positive("hc_mult"),
        hc_sinkhorn_iters=fields.positive("hc_sinkhorn_iters"),
        hc_eps=fields.above("hc_eps", 0),
        rms_norm_eps=fields.above("rms_norm_eps", 0),
        rope=_rope_config(fields),
        bos_token_id=fields.natural("bos_token_id"),
        eos_token_id=fields.natural("eos_token_id"),
        max_position_embeddings=fields.positive("max_position_embeddings"),
        torch_dtype=fields.choice_of(("torch_dtype", "dtype"), ("bfloat16", "float32", "float16")),
        vision=_vision_config(fields),
        draft=_draft_config(fields),
        quantisation=quantisation_config(fields),
    )
    _check_fixed_choices(fields)
    _check_shapes(config)
    for name in sorted(fields.unread() - IGNORED_FIELDS):
        log.warning("config.json: field %r is not known to deepspan and has no effect", name)
    return config


def _check_identity(raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type.startswith(("deepseek_v41", "deepseek_v4.1", "deepseek_v4_1")):
        raise ConfigError(
            f"model_type {model_type!r} is DeepSeek-V4.1: another image layout and causal images; "
            f"deepspan serves {MODEL_TYPE!r} only"
        )
    if model_type != MODEL_TYPE:
        raise ConfigError(f"model_type must be {MODEL_TYPE!r}, found {model_type!r}")
    architectures = raw.get("architectures")
    if architectures is not None and architectures not in ([name] for name in SUPPORTED_ARCHITECTURES):
        raise ConfigError(f"architectures must be {list(SUPPORTED_ARCHITECTURES)}, found {architectures!r}")
    for foreign in ("kv_lora_rank", "n_group", "topk_group", "first_k_dense_replace"):
        if raw.get(foreign) is not None:
            raise ConfigError(f"{foreign} does not exist in DeepSeek-V4; this file describes another model")


def _check_fixed_choices(fields: Fields) -> None:
    """Fields with one served value: anything else would silently be computed wrongly."""
    fixed = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, served in fixed.items():
        fields.equal_if_present(name, served)


def _compress_ratios(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Of the layers, and behind them those of draft stages."""
    ratios = fields.int_list("compress_ratios")
    if len(ratios) < num_layers:
        raise ConfigError(f"compress_ratios has {len(ratios)} entries for num_hidden_layers {num_layers}")
    backbone, draft = ratios[:num_layers], ratios[num_layers:]
    for ratio in backbone:
        if ratio < 0 or ratio in (1, 2, 3) or (ratio > OVERLAP_RATIO and ratio % OVERLAP_RATIO):
            raise ConfigError(
                f"compress_ratios holds {ratio}; served are 0 (window only), {OVERLAP_RATIO} (overlapping, indexed) "
                f"and multiples of {OVERLAP_RATIO} (128 in the release)"
            )
    if any(draft):
        raise ConfigError(f"compress_ratios of draft stages must be 0, found {list(draft)}")
    return tuple(ratios)


def _rope_config(fields: Fields) -> RopeConfig:
    scaling = fields.sub("rope_scaling")
    scaling.choice_of(("type", "rope_type"), ("yarn",))
    scaling.equal_if_present("rope_type", "yarn")
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if scaling.optional(name) is not None:
            raise ConfigError(f"rope_scaling.{name} is not part of DeepSeek-V4 (no attention factor)")
    rope = RopeConfig(
        theta=fields.above("rope_theta", 1),
        compress_theta=fields.above("compress_rope_theta", 1),
        factor=scaling.number("factor"),
        original_max_position_embeddings=scaling.positive("original_max_position_embeddings"),
        beta_fast=scaling.above("beta_fast", 0),
        beta_slow=scaling.above("beta_slow", 0),
    )
    if rope.factor < 1:
        raise ConfigError(f"rope_scaling.factor must be at least 1, found {rope.factor}")
    return rope


def _vision_config(fields: Fields) -> VisionConfig | None:
    if fields.optional("vision_n_layers") is None:
        fields.refuse_others_with_prefix("vision_", because="vision_n_layers is absent")
        return None
    if fields.natural("vision_n_layers") == 0:
        fields.skip_with_prefix("vision_")
        return None
    vision = VisionConfig(
        n_layers=fields.positive("vision_n_layers"),
        dim=fields.positive("vision_dim"),
        n_heads=fields.positive("vision_n_heads"),
        inter_dim=fields.positive("vision_inter_dim"),
        patch_size=fields.positive("vision_patch_size"),
        downsample_ratio=fields.positive("vision_downsample_ratio"),
        max_n_token=fields.positive("vision_max_n_token"),
        min_pixels=fields.positive("vision_min_pixels"),
        max_wh_ratio=fields.positive("vision_max_wh_ratio"),
        rope_theta=fields.above("vision_rope_theta", 1),
    )
    if vision.dim % vision.n_heads or vision.head_dim % 4:
        raise ConfigError(
            f"vision_n_heads {vision.n_heads} must divide vision_dim {vision.dim} into heads of a multiple of 4 "
            "(two rotary axes)"
        )
    return vision


def _draft_config(fields: Fields) -> DraftConfig | None:
    if fields.optional("dspark_block_size") is None:
        fields.refuse_others_with_prefix("dspark_", because="dspark_block_size is absent")
        return None
    return DraftConfig(
        block_size=fields.positive("dspark_block_size"),
        noise_token_id=fields.natural("dspark_noise_token_id"),
        target_layer_ids=tuple(fields.int_list("dspark_target_layer_ids")),
        markov_rank=fields.positive("dspark_markov_rank"),
    )


def _check_shapes(config: ModelConfig) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    require(
        config.num_attention_heads % config.o_groups == 0,
        f"o_groups {config.o_groups} must divide num_attention_heads {config.num_attention_heads}",
    )
    for name, size in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        require(
            config.qk_rope_head_dim <= size,
            f"qk_rope_head_dim {config.qk_rope_head_dim} is larger than {name} {size}",
        )
    require(config.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim must be even, found {config.qk_rope_head_dim}")
    require(
        config.num_experts_per_tok <= config.n_routed_experts,
        f"num_experts_per_tok {config.num_experts_per_tok} is larger than n_routed_experts {config.n_routed_experts}",
    )
    require(
        config.num_hash_layers <= config.num_hidden_layers,
        f"num_hash_layers {config.num_hash_layers} is larger than num_hidden_layers {config.num_hidden_layers}",
    )
    for name in ("bos_token_id", "eos_token_id"):
        require(
            getattr(config, name) < config.vocab_size,
            f"{name} {getattr(config, name)} is outside vocab_size {config.vocab_size}",
        )
    if config.draft is not None:
        require(
            config.draft.noise_token_id < config.vocab_size,
            f"dspark_noise_token_id {config.draft.noise_token_id} is outside vocab_size {config.vocab_size}",
        )
        require(len(config.draft.target_layer_ids) > 0, "dspark_target_layer_ids is empty")
        for layer in config.draft.target_layer_ids:
            require(
                0 <= layer < config.num_hidden_layers,
                f"dspark_target_layer_ids holds {layer}, num_hidden_layers is {config.num_hidden_layers}",
            )
