"""Linear layers whose weight stays as a quantised checkpoint holds it; they take the place of plain ones when loaded.

Invariants: parameters carry the names, shapes and dtypes of the file and are never widened; results are in the dtype
that the plain layer computes in. Called by `weights.load`.

Shapes: T rows, K inputs, N outputs, G groups, R outputs of a group.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deepspan.ops.formats import Format, Packed
from deepspan.ops.registry import OpTable

STATIC_PARAMETERS = ("input_scale", "input_offset", "quant_bias", "deq_scale")


class PackedLinear(nn.Module):
    """`x . weight^T` for a packed weight. Parameters are those of `format` (`scale_name` and `STATIC_PARAMETERS`)."""

    weight: nn.Parameter

    def __init__(self, format: Format, tensors: Mapping[str, Tensor], ops: OpTable, *, dtype: torch.dtype) -> None:
        """tensors: parameters by name, to be filled by the loader. dtype: of results."""
        super().__init__()
        self.format, self._ops, self._dtype = format, ops, dtype
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def operand(self) -> Packed:
        """The weight as ops take it."""
        return Packed(self.weight, getattr(self, scale_name(self.format)))

    def forward(self, x_TK: Tensor) -> Tensor:
        x = x_TK.to(self._dtype)
        if self.format is Format.FP8:
            return self._ops.linear_fp8(x, self.operand)
        if self.format is Format.INT8:
            return self._ops.linear_int8(x, self.operand)
        assert self.format is Format.INT8_STATIC, f"{self.format} is a format of experts"
        return self._ops.linear_int8_static(
            x, self.weight, self.input_scale, self.input_offset, self.quant_bias, self.deq_scale
        )

    def by_group(self, x_TGK: Tensor) -> Tensor:
        """Each group of inputs through its own share of the rows: [T, G, R]."""
        assert self.format is Format.FP8, f"{self.format} has no grouped op"
        return self._ops.grouped_linear_fp8(x_TGK.to(self._dtype), self.operand)


def scale_name(format: Format) -> str:
    """Name of the scale beside `weight`, as checkpoints have it."""
    return "scale" if format in (Format.FP8, Format.FP4) else "weight_scale"
