"""Checkpoints that are headers only: files of the right size whose data takes no place on disk, and is never read."""

import json
from collections.abc import Mapping
from pathlib import Path

from deepspan.weights.header import StoredTensor


def write_headers(file: Path, tensors: Mapping[str, StoredTensor]) -> int:
    """A safetensors file of these tensors, sparse behind its header. Returns bytes of data."""
    entries, reached = {}, 0
    for name, tensor in tensors.items():
        span = [reached, reached + tensor.num_bytes]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        reached = span[1]
    text = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + reached)
    return reached


def write_release(folder: Path, raw: dict, tensors: Mapping[str, StoredTensor]) -> Path:
    """A folder with `raw` as config.json, an index, and a file per layer and draft stage, one for all else."""
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else "", {})[name] = (
            tensor
        )
    weight_map, total = {}, 0
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(shards.values(), start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_headers(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
