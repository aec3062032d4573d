"""The released configurations, written out by hand: text with one MTP stage, and what vision and DSpark add.

`flash()` and its like give fresh copies, so that a test may edit them.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from deepspan.config.model import VisionConfig

_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}
_DSPARK = {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
}
_VISION = {
    "num_nextn_predict_layers": 3,
    "rms_norm_eps": 1e-20,
    "vision_dim": 1024,
    "vision_downsample_ratio": 3,
    "vision_inter_dim": 2816,
    "vision_max_n_token": 384,
    "vision_max_wh_ratio": 8,
    "vision_min_pixels": 147456,
    "vision_n_heads": 16,
    "vision_n_layers": 32,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000.0,
}


def flash() -> dict[str, Any]:
    """The text model, whose one draft stage is a plain MTP layer."""
    return deepcopy(_FLASH)


def flash_dspark() -> dict[str, Any]:
    """The text model with three DSpark stages. Its `num_nextn_predict_layers` is stale."""
    return deepcopy(_FLASH | _DSPARK)


def flash_vision() -> dict[str, Any]:
    """The vision model, with three DSpark stages."""
    return deepcopy(_FLASH | _DSPARK | _VISION)


RELEASED_VISION = VisionConfig(
    n_layers=32,
    dim=1024,
    n_heads=16,
    inter_dim=2816,
    patch_size=14,
    downsample_ratio=3,
    max_n_token=384,
    min_pixels=147456,
    max_wh_ratio=8,
    rope_theta=10000.0,
)
TINY_VISION = replace(RELEASED_VISION, patch_size=2, max_n_token=64, min_pixels=144)
