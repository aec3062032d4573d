"""Tiny random checkpoints in the released format: config.json, safetensors with original names, tokenizer.

Every test model comes from here. Invariants: the same arguments give the same bytes; a tensor's values depend on the
seed, its name and its shape only (a hash table's on the number of experts too), so that a variant (more layers, no
vision) keeps what it shares. Called by
`deepspan tiny` and by tests.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from deepspan.config.model import parse_model_config
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.weights.checkpoint import DESCRIPTION_FILE, INDEX_FILE
from deepspan.weights.names import locate
from deepspan.weights.table import DraftKind, Storage, Table, TensorSpec, backbone_tensors, draft_tensors
from deepspan.weights.writer import write_index, write_json, write_tensors

RELEASED_VISION_FIELDS = {
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
    "vision_rope_theta": 10000.0,
}


def tiny_config(
    *,
    vocab_size: int,
    ratios: Sequence[int] = (0, 4, 128, 4),
    vision: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Contents of a `config.json`: released fields and constants, small sizes. One layer per entry of `ratios`.

    32 index heads although everything else is small: with few, all ReLUs can be off at once, scores tie at exactly 0,
    and two right implementations may choose different entries.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "sliding_window": 128,
        "compress_ratios": list(ratios),
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 1,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    if vision:
        config |= {"vision_n_layers": 2, "vision_dim": 32, "vision_n_heads": 2, "vision_inter_dim": 48}
        config |= RELEASED_VISION_FIELDS
    return config | dict(overrides or {})


def write_tiny(
    folder: str | Path,
    *,
    ratios: Sequence[int] = (0, 4, 128, 4),
    vision: bool = True,
    seed: int = 0,
    draft_stages: int = 0,
    draft_kind: DraftKind = DraftKind.DSPARK,
    num_shards: int = 1,
    transformers_names: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder (made if needed) and return it.

    draft_stages: stages under `mtp.`, of a kind (with DSpark, config.json gets the dspark fields). num_shards: above
    one adds an index. transformers_names: stacked experts and other names of `weights.names`, not the original ones.
    overrides: fields of config.json. Raises ConfigError if they cannot belong together.
    """
    folder = Path(folder)
    with TemporaryDirectory() as scratch:  # a refused configuration must leave nothing behind in `folder`
        vocab_size = write_tiny_tokenizer(scratch)
    raw = tiny_config(vocab_size=vocab_size, ratios=ratios, vision=vision)
    if draft_stages:
        raw |= {
            "compress_ratios": [*ratios, *[0] * draft_stages],
            "num_nextn_predict_layers": draft_stages,
        }
    if draft_stages and draft_kind is DraftKind.DSPARK:
        raw |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": raw["vocab_size"] - 1,
            "dspark_target_layer_ids": list(range(len(ratios)))[-3:],
            "dspark_markov_rank": 16,
        }
    raw |= dict(overrides or {})
    config = parse_model_config(raw)
    table = backbone_tensors(config) | draft_tensors(config, draft_stages, draft_kind)
    tensors = random_tensors(table, seed)
    if transformers_names:
        tensors = _stack(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(folder)
    write_json(folder / "config.json", raw)
    _save(folder, tensors, num_shards)
    return folder


def random_tensors(table: Table, seed: int) -> dict[str, torch.Tensor]:
    """Values for every tensor of a table, in the dtypes of an unquantised checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in table.items():
        rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        if spec.storage is Storage.INT64:
            num_experts = table[name.replace("tid2eid", "weight")].shape[0]
            tensors[name] = _random_choices(rng, spec.shape, num_experts)
        else:
            tensors[name] = _random_values(rng, name, spec)
    return tensors


def file_dtype(spec: TensorSpec) -> torch.dtype:
    """How an unquantised checkpoint stores a tensor: what the release keeps in fp32 or int64 so, all else as bf16."""
    return {Storage.FP32: torch.float32, Storage.INT64: torch.int64}.get(spec.storage, torch.bfloat16)


def _random_choices(rng: np.random.Generator, shape: tuple[int, ...], num_experts: int) -> torch.Tensor:
    """Distinct expert ids in each row of a hash table [V, A]."""
    rows, num_active = shape
    order = rng.random((rows, num_experts)).argsort(axis=1)
    return torch.from_numpy(order[:, :num_active].astype(np.int64).copy())


def _random_values(rng: np.random.Generator, name: str, spec: TensorSpec) -> torch.Tensor:
    noise = rng.standard_normal(spec.shape)
    last = name.rsplit(".", 1)[-1]
    if "norm" in name:
        values = 1 + 0.1 * noise
    elif name == "embed.weight" or name.startswith("image_"):
        values = noise
    elif last.endswith("_scale"):
        values = 1 + 0.1 * noise
    elif len(spec.shape) == 1 or last == "ape":
        values = 0.3 * noise
    else:
        values = noise / np.sqrt(spec.shape[-1])
    return torch.from_numpy(values).to(file_dtype(spec))


def _stack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Original names -> transformers names; experts are stacked, parts one after the other along the rows."""
    stacked: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = locate(name)
        if place.expert is None:
            result[place.key] = tensor
        else:
            stacked.setdefault(place.key, {})[place.expert, place.part] = tensor
    for key, parts in stacked.items():
        experts, num_parts = (max(index) + 1 for index in zip(*parts, strict=True))
        result[key] = torch.stack([torch.cat([parts[e, p] for p in range(num_parts)]) for e in range(experts)])
    return result


def _save(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    for stale in (
        *folder.glob("*.safetensors"),
        *folder.glob("*.safetensors.index.json"),
        folder / DESCRIPTION_FILE,
    ):
        stale.unlink(missing_ok=True)
    if num_shards == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        write_tensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder / INDEX_FILE, weight_map, sum(tensor.nbytes for tensor in tensors.values()))
