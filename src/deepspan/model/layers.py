"""Small layers whose parameters carry the names and shapes of the checkpoint.

Invariants: no bias in the text network; parameters are created empty (the loader or a trainer fills them); a layer
declares the dtype it computes in, and the loader converts to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspan.ops.formats import Format
from deepspan.ops.registry import OpTable


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


class Linear(nn.Module):
    """`x . weight^T (+ bias)`; weight: [out, in]. `PackedLinear` takes its place where a checkpoint is quantised."""

    format: Format | None = None

    def __init__(self, num_in: int, num_out: int, *, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty(num_out, num_in, dtype=dtype)
        self.bias = empty(num_out, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes in the weight's dtype: an fp32 layer widens a bf16 input."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    @property
    def operand(self) -> Tensor:
        """The weight as ops take it."""
        return self.weight

    def by_group(self, x_TGK: Tensor) -> Tensor:
        """Each group of inputs through its own share of the rows: [T, G, out / G]."""
        return torch.einsum("tgk,grk->tgr", x_TGK, self.weight.unflatten(0, (x_TGK.shape[1], -1)))


class RMSNorm(nn.Module):
    """RMSNorm with a plain weight."""

    def __init__(self, dim: int, eps: float, ops: OpTable, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty(dim, dtype=dtype)
        self.eps = eps
        self._rms_norm = ops.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of `weight` [V, D]."""

    def __init__(self, num_rows: int, dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty(num_rows, dim, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
