"""Number formats of quantised checkpoints: what their bytes mean, and how numbers are rounded to them.

The one place that knows bits. A weight stays as the file holds it; references decode as many rows as they need.
Decoding is exact in fp32, and in bf16 too where scales are powers of two. Used by `ops.packed`, `ops.rounding` and
`weights`.

Shapes: N rows (outputs), K columns (inputs).
"""

from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_BLOCK = 128  # rows and columns that share a scale
FP4_GROUP = 32  # columns of one row that share a scale
FP8_MAX, FP4_MAX, INT8_MAX = 448.0, 6.0, 127.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; the fourth is the sign
E8M0_NAN = 0xFF


class Format(Enum):
    """How the weight of a linear layer is kept when it is not kept as plain numbers."""

    FP8 = "fp8"  # e4m3 [N, K], a scale per block of 128 x 128
    FP4 = "fp4"  # e2m1, two columns a byte [N, K / 2], a scale per row and 32 columns
    INT8 = "int8"  # [N, K], a scale per row; activations are rounded to int8, a scale per token
    INT8_STATIC = "int8_static"  # [N, K]; activations are rounded with one scale and offset that the file gives
    INT4 = "int4"  # two rows a byte [N / 2, K], a scale per row; activations as for INT8


class Packed(NamedTuple):
    """A weight as it is stored. values, scale: shapes and meaning as `Format` says."""

    values: Tensor
    scale: Tensor


# --- decoding


def decode_fp8(weight: Packed, first: int = 0, last: int | None = None) -> Tensor:
    """Rows [first, last) in fp32. values: float8_e4m3fn [N, K]; scale: e8m0 or fp32 [ceil(N/128), ceil(K/128)]."""
    values = weight.values[first:last]
    blocks = torch.arange(first, first + len(values), device=values.device) // FP8_BLOCK
    columns = weight.scale.float().repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
    return values.float() * columns[blocks]


def decode_fp4(weight: Packed) -> Tensor:
    """All rows in fp32 [N, K]. values: [N, K / 2] of one byte, low nibble first; scale: e8m0 [N, K / 32]."""
    values = decode_e2m1(weight.values)
    return (values.unflatten(-1, (-1, FP4_GROUP)) * weight.scale.float()[..., None]).flatten(-2)


def decode_e2m1(pairs: Tensor) -> Tensor:
    """One-byte pairs [..., P] -> fp32 [..., 2 P]: column 2j is the low nibble of byte j, column 2j + 1 the high one."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=pairs.device)
    nibbles = torch.cat((magnitudes, -magnitudes))
    codes = torch.arange(256, device=pairs.device)
    table = torch.stack((nibbles[codes & 15], nibbles[codes >> 4]), dim=1)
    return F.embedding(pairs.view(torch.uint8).int(), table).flatten(-2)


def unpack_int4(pairs: Tensor) -> Tensor:
    """Signed nibbles, int8 [N / 2, K] -> int8 [N, K]: packed row i holds row 2i low and row 2i + 1 high."""
    low = torch.bitwise_left_shift(pairs, 4) >> 4  # shifting an int8 right keeps its sign
    return torch.stack((low, pairs >> 4), dim=1).flatten(0, 1)


# --- encoding


def power_of_two_above(x: Tensor) -> Tensor:
    """`2^ceil(log2 x)` in fp32, exact: read from exponent and mantissa. x: positive, normal fp32."""
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).view(torch.float32)


def encode_fp8(x: Tensor) -> Tensor:
    """Nearest e4m3 (ties to even), limited to +-448. NaN stays NaN."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 (ties to the even code), limited to +-6: codes 0 to 15, uint8. The sign of zero is kept."""
    size = x.float().abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    # Middles below a number count its code; a tie with the middle above an even code is not below it.
    for lower in range(len(E2M1_MAGNITUDES) - 1):
        middle = (E2M1_MAGNITUDES[lower] + E2M1_MAGNITUDES[lower + 1]) / 2
        code += size > middle if lower % 2 == 0 else size >= middle
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., 2 P] -> one-byte pairs, int8 [..., P]; the first of a pair is the low nibble."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).view(torch.int8)


def fp8_scale(largest: Tensor) -> Tensor:
    """Power-of-two scale that brings a group's largest magnitude into e4m3; magnitudes below 1e-4 count as that."""
    return power_of_two_above(largest.float().clamp(min=1e-4) / FP8_MAX)


def fp4_scale(largest: Tensor) -> Tensor:
    """Power-of-two scale that brings the largest magnitude of a group into e2m1; at least 2^-126."""
    return power_of_two_above(largest.float().clamp(min=FP4_MAX * 2.0**-126) / FP4_MAX)
