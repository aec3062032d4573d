"""Operations of the vision tower: two-axis rotary embedding, full attention inside each image, tile unfolding.

Shapes: N patches of all images one after the other, H heads, K head dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def vision_rope_table(grid_rows: int, grid_cols: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [grid_rows * grid_cols, head_dim / 2]: row angles, then column angles, not interleaved."""
    num_angles = head_dim // 4
    frequencies = theta ** -(torch.arange(num_angles, dtype=torch.float64) / num_angles)
    rows = torch.arange(grid_rows, dtype=torch.float64).repeat_interleave(grid_cols)
    cols = torch.arange(grid_cols, dtype=torch.float64).repeat(grid_rows)
    angles = torch.cat((rows[:, None] * frequencies, cols[:, None] * frequencies), dim=1)
    return angles.cos().float(), angles.sin().float()


def apply_vision_rope(x_NHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: pair (d, d + K/2) turns by angle d. fp32 inside, x's dtype outside. cos, sin: [N, K / 2]."""
    low, high = x_NHK.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_NHK.dtype)


def vision_attention(q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every patch attends to all patches of its own image and to no other. lengths: patches per image, sum N."""
    # Torch has fused kernels for [batch, heads, rows, dim] only; with one dimension less it builds the score matrix.
    batched = [
        tuple(x.transpose(0, 1)[None] for x in image)
        for image in zip(q_NHK.split(lengths), k_NHK.split(lengths), v_NHK.split(lengths), strict=True)
    ]
    return torch.cat([F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1) for q, k, v in batched])


def unfold_tiles(x_ND: Tensor, grid_rows: int, grid_cols: int, tile: int) -> Tensor:
    """Group an image's patches into tile x tile squares: [tiles, D * tile^2] in raster order of the tiles.

    The grid is padded with zeros at the right and the bottom; features are channel-major (channel, dy, dx).
    """
    dim = x_ND.shape[1]
    grid = x_ND.view(grid_rows, grid_cols, dim)
    grid = F.pad(grid, (0, 0, 0, -grid_cols % tile, 0, -grid_rows % tile))
    rows, cols = grid.shape[0] // tile, grid.shape[1] // tile
    tiles = grid.view(rows, tile, cols, tile, dim).permute(0, 2, 4, 1, 3)
    return tiles.reshape(rows * cols, dim * tile * tile)
