"""From plain weights to the quantised formats: single tensors, and whole checkpoints a file at a time.

Scales are chosen as the formats' own tools choose them (powers of two for FP8 and FP4, largest magnitude for int8), so
what is already quantised to a grid is found again. Written checkpoints are what `weights.load` reads. Called by
`deepspan tiny` and by tests.

Shapes: N rows (outputs), K columns (inputs).
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from deepspan.config.model import load_model_config
from deepspan.errors import WeightsError
from deepspan.ops.formats import (
    FP4_GROUP,
    FP8_BLOCK,
    FP8_MAX,
    INT8_MAX,
    Format,
    Packed,
    encode_e2m1,
    encode_fp8,
    fp4_scale,
    fp8_scale,
    pack_nibbles,
    unpack_int4,
)
from deepspan.weights import description as scheme
from deepspan.weights.checkpoint import DESCRIBED_STEM, DESCRIPTION_FILE, INDEX_FILE, Checkpoint
from deepspan.weights.table import DraftKind, Storage, Table, backbone_tensors, draft_tensors

FLOAT_OF_EXPORTS = ("attn.wo_a", "attn.wo_b", "e_proj", "h_proj", "main_proj")  # what the official W8A8 recipe leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Formats of the linear layers that the release quantises. block_scale: dtype of FP8 scales."""

    dense: Format
    experts: Format
    block_scale: torch.dtype = torch.float8_e8m0fnu

    @property
    def is_described(self) -> bool:
        """Whether the checkpoint is an export with a description, rather than one in the release's own format."""
        return self.dense is Format.INT8


RECIPES = {
    "fp8-fp4": Recipe(dense=Format.FP8, experts=Format.FP4),
    "fp8": Recipe(dense=Format.FP8, experts=Format.FP8, block_scale=torch.float32),
    "w8a8": Recipe(dense=Format.INT8, experts=Format.INT8),
    "w4a8": Recipe(dense=Format.INT8, experts=Format.INT4),
}


# --- single tensors


def quantise_fp8(weight_NK: Tensor, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> Packed:
    """e4m3 in blocks of 128 x 128; blocks at the edge may be smaller. scale_dtype: float8_e8m0fnu or float32."""
    rows, columns = weight_NK.shape
    weight = weight_NK.float()
    padded = F.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    largest = blocks.abs().amax(dim=(1, 3))
    exact = torch.where(largest == 0, 1.0, largest / FP8_MAX)
    scale = exact if scale_dtype == torch.float32 else fp8_scale(largest)
    wide = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return Packed(encode_fp8(weight / wide), scale.to(scale_dtype))


def quantise_fp4(weight_NK: Tensor) -> Packed:
    """e2m1 in groups of 32 columns, two columns a byte: int8 [N, K / 2], e8m0 [N, K / 32]. K: a multiple of 32."""
    groups = weight_NK.float().unflatten(1, (-1, FP4_GROUP))
    scale = fp4_scale(groups.abs().amax(dim=-1))
    codes = encode_e2m1(groups / scale[..., None]).flatten(1)
    return Packed(pack_nibbles(codes), scale.to(torch.float8_e8m0fnu))


def quantise_int8(weight_NK: Tensor) -> Packed:
    """int8 with a scale per row: int8 [N, K], fp32 [N, 1]."""
    weight = weight_NK.float()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / INT8_MAX
    return Packed(torch.round(weight / scale).clamp(-128, 127).to(torch.int8), scale)


def quantise_int4(weight_NK: Tensor) -> Packed:
    """Signed nibbles with a scale per row, two rows a byte: int8 [N / 2, K], fp32 [N, 1]. N: even."""
    weight = weight_NK.float()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / 7
    codes = torch.round(weight / scale).clamp(-8, 7).to(torch.int8) & 15
    return Packed(codes[::2] | (codes[1::2] << 4), scale)


def static_tensors(
    weight_NK: Tensor, input_scale: float, input_offset: int, bias_N: Tensor | None
) -> dict[str, Tensor]:
    """A linear layer in static W8A8: all its tensors by their last name. bias: fp32, or None for zero."""
    values, scale = quantise_int8(weight_NK)
    deq_scale = input_scale * scale.flatten()
    bias = torch.zeros_like(deq_scale) if bias_N is None else bias_N / deq_scale
    return {
        "weight": values,
        "input_scale": torch.tensor([input_scale]),
        "input_offset": torch.tensor([float(input_offset)]),
        "quant_bias": torch.round(bias - input_offset * values.sum(dim=1)).to(torch.int32),
        "deq_scale": deq_scale,
    }


# --- checkpoints


def write_quantised(source: str | Path, folder: str | Path, recipe: Recipe) -> Path:
    """Write a plain checkpoint with original names again in the formats of `recipe`; returns `folder`.

    One file becomes one file, so no more than one is in memory. Raises WeightsError if `source` is not plain, or holds
    a matrix whose size its format cannot have.
    """
    source, folder = Path(source), Path(folder)
    if source.resolve() == folder.resolve():
        raise WeightsError(f"{folder} is the checkpoint to quantise; it cannot be written over while it is read")
    checkpoint, table = Checkpoint(source), _linear_layers(source)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"), folder / DESCRIPTION_FILE):
        stale.unlink(missing_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX_FILE, "config.json"):
            shutil.copyfile(file, folder / file.name)
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    weight_map: dict[str, str] = {}
    labels: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        stem = DESCRIBED_STEM if recipe.is_described else "model"
        name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for key in (key for key, stored in checkpoint.tensors.items() if stored.file == file):
            new, label = _quantised(key, checkpoint.read(key), table, recipe)
            tensors |= new
            labels |= dict.fromkeys(new, label)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = f"{DESCRIBED_STEM}.safetensors.index.json" if recipe.is_described else INDEX_FILE
    _write_json(folder / index, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", _config(source, recipe))
    if recipe.is_described:
        metadata = {
            "model_quant_type": scheme.W8A8_DYNAMIC,
            "version": "1.0.0",
            "group_size": 0,
            "metadata": {},
            "optional": {},
        }
        _write_json(folder / DESCRIPTION_FILE, metadata | labels)
    return folder


def _linear_layers(source: Path) -> Table:
    """What the release quantises, draft stages of either kind included."""
    config = load_model_config(source)
    table = backbone_tensors(config)
    stages = 8  # more than any checkpoint has; names that are not there ask for nothing
    kinds = [DraftKind.MTP] if config.draft is None else [DraftKind.MTP, DraftKind.DSPARK]
    for kind in kinds:
        table |= draft_tensors(config, stages, kind)
    return {name: spec for name, spec in table.items() if spec.storage in (Storage.FP8, Storage.FP4)}


def _quantised(name: str, tensor: Tensor, table: Table, recipe: Recipe) -> tuple[dict[str, Tensor], str]:
    """A stored tensor as the recipe stores it, with its companions, and their label."""
    if tensor.element_size() == 1:
        raise WeightsError(f"{name} is stored as {tensor.dtype}; expected a checkpoint that is not quantised yet")
    module = name.removesuffix(".weight")
    if name not in table or (recipe.is_described and module.endswith(FLOAT_OF_EXPORTS)):
        return {name: tensor}, scheme.FLOAT
    form = recipe.experts if table[name].storage is Storage.FP4 else recipe.dense
    rows, columns = tensor.shape
    if (form is Format.FP4 and columns % FP4_GROUP) or (form is Format.INT4 and rows % 2):
        raise WeightsError(f"{name} has shape [{rows}, {columns}], which {form.value} cannot hold")
    if form is Format.FP8:
        values, scale = quantise_fp8(tensor, recipe.block_scale)
    else:
        values, scale = {Format.FP4: quantise_fp4, Format.INT8: quantise_int8, Format.INT4: quantise_int4}[form](tensor)
    if not recipe.is_described:
        return {name: values, f"{module}.scale": scale}, scheme.FLOAT
    tensors = {name: values, f"{module}.weight_scale": scale, f"{module}.weight_offset": torch.zeros_like(scale)}
    if form is Format.INT4:
        # A correction for kernels that shift activations by 8; in 16 runs of columns for the second projection.
        runs = 16 if module.endswith(".w2") and columns % 16 == 0 else 1
        tensors[f"{module}.scale_bias"] = 8 * (unpack_int4(values) * scale).unflatten(1, (runs, -1)).sum(dim=-1)
    return tensors, scheme.W4A8_DYNAMIC if form is Format.INT4 else scheme.W8A8_DYNAMIC


def _config(source: Path, recipe: Recipe) -> dict[str, object]:
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if recipe.is_described:
        return raw
    scale_fmt = {} if recipe.block_scale == torch.float32 else {"scale_fmt": "ue8m0"}
    return raw | {
        "expert_dtype": recipe.experts.value,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            **scale_fmt,
        },
    }


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
