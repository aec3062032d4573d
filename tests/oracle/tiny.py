"""Random weights under the checkpoint's names for a small configuration, for tests.

Matrices have standard deviation 1/sqrt(inputs), norms lie around 1, biases and sinks are small noise, and the hash
table lists distinct experts: nothing is left at a value that would hide a missing term.
"""

import numpy as np

TEXT_CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 2048,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
}

VISION_CONFIG = {
    "vision_n_layers": 2,
    "vision_dim": 32,
    "vision_n_heads": 2,
    "vision_inter_dim": 48,
    "vision_patch_size": 2,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 64,
    "vision_min_pixels": 144,
    "vision_max_wh_ratio": 8,
    "vision_rope_theta": 10000.0,
}


def _attention_shapes(config: dict, ratio: int) -> dict[str, tuple[int, ...]]:
    dim, rank, width = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups, o_rank = config["num_attention_heads"], config["o_groups"], config["o_lora_rank"]
    shapes = {
        "attn.wq_a.weight": (rank, dim),
        "attn.q_norm.weight": (rank,),
        "attn.wq_b.weight": (heads * width, rank),
        "attn.wkv.weight": (width, dim),
        "attn.kv_norm.weight": (width,),
        "attn.wo_a.weight": (groups * o_rank, heads * width // groups),
        "attn.wo_b.weight": (dim, groups * o_rank),
        "attn.attn_sink": (heads,),
    }

    def compressor(prefix: str, size: int) -> None:
        series = 2 * size if ratio == 4 else size
        shapes[prefix + "ape"] = (ratio, series)
        shapes[prefix + "wkv.weight"] = shapes[prefix + "wgate.weight"] = (series, dim)
        shapes[prefix + "norm.weight"] = (size,)

    if ratio != 0:
        compressor("attn.compressor.", width)
    if ratio == 4:
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        compressor("attn.indexer.compressor.", index_width)
        shapes["attn.indexer.wq_b.weight"] = (index_heads * index_width, rank)
        shapes["attn.indexer.weights_proj.weight"] = (index_heads, dim)
    return shapes


def _layer_shapes(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
    dim, inner, n = config["hidden_size"], config["moe_intermediate_size"], config["hc_mult"]
    experts = config["n_routed_experts"]
    shapes = _attention_shapes(config, config["compress_ratios"][layer])
    for name in ("attn", "ffn"):
        shapes[f"{name}_norm.weight"] = (dim,)
        shapes[f"hc_{name}_fn"] = (2 * n + n * n, n * dim)
        shapes[f"hc_{name}_base"] = (2 * n + n * n,)
        shapes[f"hc_{name}_scale"] = (3,)
    shapes["ffn.gate.weight"] = (experts, dim)
    if layer >= config["num_hash_layers"] or "vision_n_layers" in config:
        shapes["ffn.gate.bias"] = (experts,)
    if "vision_n_layers" in config:
        shapes["ffn.gate.bias_vl"] = (experts,)
    for expert in ["shared_experts", *(f"experts.{e}" for e in range(experts))]:
        shapes[f"ffn.{expert}.w1.weight"] = shapes[f"ffn.{expert}.w3.weight"] = (inner, dim)
        shapes[f"ffn.{expert}.w2.weight"] = (dim, inner)
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _vision_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    dim, width, inner = config["hidden_size"], config["vision_dim"], config["vision_inter_dim"]
    inputs = 3 * config["vision_patch_size"] ** 2
    shapes = {"vision.patch_embed.proj.weight": (width, inputs), "vision.patch_embed.proj.bias": (width,)}
    for layer in range(config["vision_n_layers"]):
        prefix = f"vision.blocks.{layer}."
        shapes[prefix + "norm1.weight"] = shapes[prefix + "norm2.weight"] = (width,)
        shapes[prefix + "attn.wqkv.weight"], shapes[prefix + "attn.wqkv.bias"] = (3 * width, width), (3 * width,)
        shapes[prefix + "attn.wo.weight"], shapes[prefix + "attn.wo.bias"] = (width, width), (width,)
        shapes[prefix + "mlp.w1.weight"], shapes[prefix + "mlp.w2.weight"] = (2 * inner, width), (width, inner)
    shapes["vision.norm.weight"] = (width,)
    shapes["aligner.w1.weight"] = (dim, width * config["vision_downsample_ratio"] ** 2)
    shapes["aligner.w2.weight"] = (dim, dim)
    shapes["aligner.w1.bias"] = shapes["aligner.w2.bias"] = (dim,)
    for marker in ("start", "end", "newline", "pad"):
        shapes[f"image_{marker}"] = (dim,)
    return shapes


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape)
    if name in ("embed.weight", "attn_sink") or name.startswith("image_"):
        return noise
    if "norm" in name or name.endswith("_scale"):
        return 1 + 0.1 * noise
    if name.endswith(".ape"):
        return 0.5 * noise
    return 0.3 * noise if len(shape) == 1 else noise / np.sqrt(shape[-1])


def random_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """float64 weights of the whole checkpoint, vision included if the configuration has it."""
    rng = np.random.default_rng(seed)
    dim, vocabulary, n = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    shapes = {
        "embed.weight": (vocabulary, dim),
        "head.weight": (vocabulary, dim),
        "norm.weight": (dim,),
        "hc_head_fn": (n, n * dim),
        "hc_head_base": (n,),
        "hc_head_scale": (1,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= _layer_shapes(config, layer)
    if "vision_n_layers" in config:
        shapes |= _vision_shapes(config)
    weights = {name: _draw(name, shape, rng) for name, shape in shapes.items()}
    for layer in range(config["num_hash_layers"]):
        order = rng.random((vocabulary, config["n_routed_experts"])).argsort(axis=1)
        weights[f"layers.{layer}.ffn.gate.tid2eid"] = order[:, : config["num_experts_per_tok"]]
    return weights
