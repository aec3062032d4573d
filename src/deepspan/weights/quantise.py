"""From plain weights to the quantised formats: single tensors, and which format a layer has in which recipe.

Scales are chosen as the formats' own tools choose them (powers of two for FP8 and FP4, largest magnitude for int8), so
what is already quantised to a grid is found again. Called by `weights.plan`, `deepspan tiny` and by tests.

Shapes: N rows (outputs), K columns (inputs).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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

FLOAT_OF_EXPORTS = ("attn.wo_a", "attn.wo_b", "e_proj", "h_proj", "main_proj")  # what the official W8A8 recipe leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """Smallest and largest input that a layer was seen to take; 0 is always inside."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """Of 256 steps."""
        return max(max(self.high, 0.0) - min(self.low, 0.0), 1e-5) / 255

    @property
    def offset(self) -> int:
        """What 0 is rounded to: the lowest input becomes -128."""
        return round(-128 - min(self.low, 0.0) / self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """One way to store a weight. block_scale: of fp8. is_down: the second projection of an expert. inputs: static."""

    form: Format
    block_scale: torch.dtype = torch.float8_e8m0fnu
    is_down: bool = False
    inputs: InputRange | None = None


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
    bias = torch.zeros_like(deq_scale) if bias_N is None else torch.round(bias_N / deq_scale)
    return {
        "weight": values,
        "input_scale": torch.tensor([input_scale]),
        "input_offset": torch.tensor([float(input_offset)]),
        "quant_bias": (bias.long() - input_offset * values.sum(dim=1)).to(torch.int32),
        "deq_scale": deq_scale,
    }


def encode(weight_NK: Tensor, coding: Coding) -> dict[str, Tensor]:
    """A weight in a format: all its tensors by their last name, as the format's own tools write them.

    On the meta device it gives their shapes and dtypes. Raises WeightsError if the format cannot hold the shape.
    """
    rows, columns = weight_NK.shape
    form = coding.form
    if (form is Format.FP4 and columns % FP4_GROUP) or (form is Format.INT4 and rows % 2):
        raise WeightsError(f"shape [{rows}, {columns}], which {form.value} cannot hold")
    if form is Format.FP8:
        values, scale = quantise_fp8(weight_NK, coding.block_scale)
        return {"weight": values, "scale": scale}
    if form is Format.FP4:
        values, scale = quantise_fp4(weight_NK)
        return {"weight": values, "scale": scale}
    if form is Format.INT8_STATIC:
        assert coding.inputs is not None, "a static layer needs the range of its inputs"
        return static_tensors(weight_NK, coding.inputs.scale, coding.inputs.offset, None)
    values, scale = quantise_int8(weight_NK) if form is Format.INT8 else quantise_int4(weight_NK)
    tensors = {"weight": values, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if form is Format.INT4:
        # A correction for kernels that shift activations by 8; in 16 runs of columns for the second projection.
        runs = 16 if coding.is_down and columns % 16 == 0 else 1
        tensors["scale_bias"] = 8 * (unpack_int4(values) * scale).unflatten(1, (runs, -1)).sum(dim=-1)
    return tensors


# --- recipes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Formats of the linear layers that the release quantises; None is plain. block_scale: dtype of FP8 scales.

    inputs: by module, of layers that get static int8 in the place of dynamic.
    """

    dense: Format | None
    experts: Format | None
    block_scale: torch.dtype = torch.float8_e8m0fnu
    inputs: Mapping[str, InputRange] = field(default_factory=dict)

    @property
    def is_described(self) -> bool:
        """Whether the checkpoint is an export with a description, rather than one in the release's own format."""
        return self.dense is Format.INT8

    def coding(self, module: str, *, is_expert: bool) -> Coding | None:
        """How a layer that the release quantises is stored; None is plain."""
        if self.is_described and module.endswith(FLOAT_OF_EXPORTS):
            return None
        form = self.experts if is_expert else self.dense
        if form is None:
            return None
        if not is_expert and form is Format.INT8 and module in self.inputs:
            return Coding(form=Format.INT8_STATIC, inputs=self.inputs[module])
        return Coding(form=form, block_scale=self.block_scale, is_down=module.endswith(".w2"))


PLAIN = Recipe(dense=None, experts=None)
RECIPES = {
    "fp8-fp4": Recipe(dense=Format.FP8, experts=Format.FP4),
    "fp8": Recipe(dense=Format.FP8, experts=Format.FP8, block_scale=torch.float32),
    "w8a8": Recipe(dense=Format.INT8, experts=Format.INT8),
    "w4a8": Recipe(dense=Format.INT8, experts=Format.INT4),
}


def write_quantised(source: str | Path, folder: str | Path, recipe: Recipe) -> Path:
    """Write a checkpoint again in the formats of `recipe`, in as many files as it has; returns `folder`.

    A checkpoint that `folder` holds is replaced. Raises WeightsError as `weights.convert` does.
    """
    from deepspan.weights.convert import replace_by  # which encodes with what is above

    return replace_by(Path(source), Path(folder), recipe)
