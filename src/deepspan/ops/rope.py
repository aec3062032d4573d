"""Rotary embedding on the last dimensions of a vector, interleaved pairs, fp32 tables.

Shapes: T rows, R rotary dims. The text network rotates pairs (2i, 2i+1) of the last R dims; the leading dims pass.
"""

import math

import torch
from torch import Tensor

from deepspan.config.model import RopeConfig


def rope_frequencies(rope: RopeConfig, num_dims: int, compressed: bool) -> Tensor:
    """Angle per position of each pair: float64 [R / 2].

    Window layers: `theta^(-2i/R)`. Compressed layers: YaRN over `compress_theta`, always on whatever the length,
    without attention factor. Pairs below `low` keep their frequency, pairs above `high` are divided by `factor`.
    """
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float64) / num_dims
    if not compressed:
        return rope.theta**-exponents
    base = rope.compress_theta**-exponents

    def pair_with_rotations(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return num_dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.compress_theta))

    low = max(math.floor(pair_with_rotations(rope.beta_fast)), 0)
    high: float = min(math.ceil(pair_with_rotations(rope.beta_slow)), num_dims - 1)
    if low == high:
        high += 0.001  # the released code's guard against dividing by zero
    ramp = ((torch.arange(num_dims // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return base * (1 - ramp) + base / rope.factor * ramp


def rope_table(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [T, R / 2], of `position * frequency`.

    frequencies: fp32 [R / 2]. positions: int [T]; exact in fp32 up to 2^24.
    """
    angles = positions.float()[:, None] * frequencies.float()
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R dims of x in interleaved pairs: `(e, o) -> (e cos - o sin, o cos + e sin)`.

    x: [T, K] or [T, H, K]. cos, sin: fp32 [T, R / 2]. inverse: rotate back. Returns x's shape and dtype.
    """
    num_dims = 2 * cos.shape[-1]
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    passed, turned = x[..., :-num_dims], x[..., -num_dims:].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((passed, turned.to(x.dtype)), dim=-1)
