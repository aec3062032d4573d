"""Linear layers and experts over weights that stay packed.

References decode a limited number of values at a time: some rows of a linear layer, one expert. Block formats (fp8,
fp4) compute in the activations' dtype, as with the same weights decoded ahead. int8 formats round the activations too,
a scale per token, and sum products as integers, exactly.

Shapes: T tokens, K inputs, N outputs, G groups, R outputs of a group, D hidden, I intermediate, A experts per token.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.ops.experts import clamped_swiglu, sum_over_experts
from deepspan.ops.formats import INT8_MAX, Packed, decode_fp4, decode_fp8, unpack_int4

MAX_DECODED = 1 << 24  # values of a weight decoded at once: 64 MB in fp32
# Sums of so many products of two int8 stay below 2^24, so fp32 adds them exactly in whatever order.
EXACT_PRODUCTS = 1024

Integers = Callable[[Packed], Tensor]  # a packed weight -> its int8 values [N, K]


# --- linear layers


def linear_fp8(x_TK: Tensor, weight: Packed) -> Tensor:
    """`x . W^T` in x's dtype: [T, N]. weight: fp8 as `formats.decode_fp8` takes it."""
    tiles = (decode_fp8(weight, first, last) for first, last in _tiles(weight.values))
    return torch.cat([F.linear(x_TK, tile.to(x_TK.dtype)) for tile in tiles], dim=-1)


def grouped_linear_fp8(x_TGK: Tensor, weight: Packed) -> Tensor:
    """Each group of inputs through its own rows: [T, G, R]. weight: fp8 [G * R, K], groups one after the other."""
    num_groups = x_TGK.shape[1]
    rank = len(weight.values) // num_groups
    groups = (decode_fp8(weight, group * rank, (group + 1) * rank) for group in range(num_groups))
    return torch.stack([F.linear(x_TGK[:, g], rows.to(x_TGK.dtype)) for g, rows in enumerate(groups)], dim=1)


def linear_int8(x_TK: Tensor, weight: Packed) -> Tensor:
    """W8A8 with a scale per token: [T, N] in x's dtype. weight: int8 [N, K], scale fp32 [N] or [N, 1]."""
    return _linear_int(x_TK, weight, _as_stored).to(x_TK.dtype)


def linear_int8_static(
    x_TK: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias_N: Tensor, deq_scale_N: Tensor
) -> Tensor:
    """W8A8 with a fixed rounding of activations: `(sum x_q w_q + quant_bias) * deq_scale`, [T, N] in x's dtype.

    weight: int8 [N, K]; input_scale, input_offset: fp32 [1]; quant_bias: int32; deq_scale: fp32, holds both scales.
    """
    rounded = (torch.round(x_TK.float() / input_scale) + input_offset).clamp(-128, 127)
    sums = int8_matmul(rounded.nan_to_num().to(torch.int8), weight) + quant_bias_N
    out = sums.float() * deq_scale_N
    # Integers cannot say NaN: a row that holds one must not come out as if it did not.
    return out.masked_fill(x_TK.isnan().any(dim=-1, keepdim=True), torch.nan).to(x_TK.dtype)


# --- experts


def experts_fp8(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
) -> Tensor:
    """`routed_experts` over fp8 weights, decoded one matrix at a time: fp32 [T, D]."""
    return _decoded_experts(x_TD, expert_ids_TA, weights_TA, w1, w3, w2, limit, decode_fp8)


def experts_fp4(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
) -> Tensor:
    """`routed_experts` over fp4 weights, decoded one matrix at a time: fp32 [T, D]."""
    return _decoded_experts(x_TD, expert_ids_TA, weights_TA, w1, w3, w2, limit, decode_fp4)


def experts_int8(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
) -> Tensor:
    """W8A8 experts: activations are rounded per token before both projections. fp32 [T, D]; see `_int_experts`."""
    return _int_experts(x_TD, expert_ids_TA, weights_TA, w1, w3, w2, limit, _as_stored)


def experts_int4(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
) -> Tensor:
    """W4A8 experts: like `experts_int8`, weights int8 [N / 2, K] of two rows a byte."""
    return _int_experts(x_TD, expert_ids_TA, weights_TA, w1, w3, w2, limit, _unpacked)


def _decoded_experts(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
    decode: Callable[[Packed], Tensor],
) -> Tensor:
    def run(expert: int, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = (F.linear(x, decode(w[expert]).to(x.dtype)) for w in (w1, w3))
        hidden = (clamped_swiglu(gate, up, limit) * weights).to(x.dtype)
        return F.linear(hidden, decode(w2[expert]).to(x.dtype))

    return sum_over_experts(x_TD, expert_ids_TA, weights_TA, len(w1), run)


def _int_experts(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Packed],
    w3: Sequence[Packed],
    w2: Sequence[Packed],
    limit: float,
    integers: Integers,
) -> Tensor:
    """The routing weight multiplies behind the second projection: before it, it would only move the token's scale."""

    def run(expert: int, x: Tensor, weights: Tensor) -> Tensor:
        hidden = clamped_swiglu(_linear_int(x, w1[expert], integers), _linear_int(x, w3[expert], integers), limit)
        return _linear_int(hidden, w2[expert], integers) * weights

    return sum_over_experts(x_TD, expert_ids_TA, weights_TA, len(w1), run)


# --- integers


def quantise_tokens(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows rounded to int8 (ties to even) with a scale each: int8 [T, K], fp32 [T, 1]. A row of zeros has scale 0.

    What is not finite in a row makes its scale so, and with it the whole row of a product: nothing is hidden.
    """
    x = x_TK.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / INT8_MAX
    return torch.round(x / scale).nan_to_num().clamp(-128, 127).to(torch.int8), scale


def int8_matmul(a_TK: Tensor, b_NK: Tensor) -> Tensor:
    """`a . b^T` of int8 matrices, exact: int32 [T, N]. fp32 products of short runs of columns, added as integers."""
    out = torch.zeros(len(a_TK), len(b_NK), dtype=torch.int32, device=a_TK.device)
    for a, b in zip(a_TK.split(EXACT_PRODUCTS, dim=1), b_NK.split(EXACT_PRODUCTS, dim=1), strict=True):
        wide = a.float()
        for first, last in _tiles(b):
            out[:, first:last] += (wide @ b[first:last].float().T).to(torch.int32)
    return out


def _linear_int(x_TK: Tensor, weight: Packed, integers: Integers) -> Tensor:
    """fp32 [T, N]."""
    rounded, scale = quantise_tokens(x_TK)
    return int8_matmul(rounded, integers(weight)).float() * scale * weight.scale.flatten()


def _as_stored(weight: Packed) -> Tensor:
    return weight.values


def _unpacked(weight: Packed) -> Tensor:
    return unpack_int4(weight.values)


def _tiles(values: Tensor) -> Iterator[tuple[int, int]]:
    """Runs of rows that hold at most MAX_DECODED values."""
    step = max(1, MAX_DECODED // values.shape[1])
    return ((first, min(first + step, len(values))) for first in range(0, len(values), step))
