"""Checkpoints in quantised formats for tests, and what they hold, decoded by statements of the formats of their own."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NIBBLES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def decoded_tensors(folder: Path) -> dict[str, Tensor]:
    """Plain fp32 tensors of a checkpoint in the release's format; numpy, and none of the project's decoders."""
    stored = stored_tensors(folder)
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        scale = stored.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in stored:
            continue
        if scale is None or not name.endswith(".weight"):
            plain[name] = tensor
        elif tensor.dtype == torch.int8:
            pairs = tensor.view(torch.uint8).numpy()
            values = np.stack((NIBBLES[pairs & 15], NIBBLES[pairs >> 4]), axis=-1).reshape(len(pairs), -1)
            sizes = 2.0 ** (scale.view(torch.uint8).numpy().astype(float) - 127)
            plain[name] = torch.from_numpy(values * np.repeat(sizes, 32, axis=1)).float()
        else:
            rows, columns = tensor.shape
            wide = np.repeat(np.repeat(scale.float().numpy(), 128, axis=0), 128, axis=1)[:rows, :columns]
            plain[name] = torch.from_numpy(tensor.float().numpy() * wide)
    return plain


def write_plain(source: Path, folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint of these tensors with the configuration of `source`, not quantised."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_edited(
    source: Path,
    folder: Path,
    edit: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    *,
    config: dict[str, object] | None = None,
    description: Callable[[dict[str, object]], object] | None = None,
) -> Path:
    """A copy of a quantised checkpoint of one file after `edit` of its tensors, and of its description."""
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, folder / file.name)
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | (config or {})))
    described = source / "quant_model_description.json"
    if described.exists():
        labels = json.loads(described.read_text())
        if description is not None:
            description(labels)
        (folder / described.name).write_text(json.dumps(labels))
    return folder
