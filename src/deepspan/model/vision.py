"""Vision tower and aligner: patches of any number of images -> one feature row per cell of each image's token grid.

Invariants: an image attends to itself only; tower norms use 1e-6, never the text network's eps; padding to whole tiles
happens after the final norm. Feature rows come in raster order; the N-layout's order is applied by the caller.

Shapes: N patches of all images, C tower width, P values per patch, F feature rows, D hidden.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.config.model import VisionConfig
from deepspan.model.layers import Linear, RMSNorm
from deepspan.ops.registry import OpTable
from deepspan.ops.vision import vision_rope_table

TOWER_NORM_EPS = 1e-6
Grid = tuple[int, int]  # rows and columns of patches


class PatchEmbed(torch.nn.Module):
    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = Linear(3 * vision.patch_size**2, vision.dim, dtype=dtype, bias=True)

    def forward(self, patches_NP: Tensor) -> Tensor:
        return self.proj(patches_NP)


class VisionAttention(torch.nn.Module):
    """Full attention inside each image; `wqkv` stacks q, k, v rows, heads are consecutive rows."""

    def __init__(self, vision: VisionConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self._ops, self.num_heads = ops, vision.n_heads
        self.wqkv = Linear(vision.dim, 3 * vision.dim, dtype=dtype, bias=True)
        self.wo = Linear(vision.dim, vision.dim, dtype=dtype, bias=True)

    def forward(self, x_NC: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.wqkv(x_NC).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = self._ops.apply_vision_rope(q, cos, sin), self._ops.apply_vision_rope(k, cos, sin)
        return self.wo(self._ops.vision_attention(q, k, v, lengths).flatten(1))


class VisionMLP(torch.nn.Module):
    """SwiGLU without clamp; `w1` stacks gate rows, then up rows."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = Linear(vision.dim, 2 * vision.inter_dim, dtype=dtype)
        self.w2 = Linear(vision.inter_dim, vision.dim, dtype=dtype)

    def forward(self, x_NC: Tensor) -> Tensor:
        gate, up = self.w1(x_NC).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class VisionBlock(torch.nn.Module):
    def __init__(self, vision: VisionConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(vision.dim, TOWER_NORM_EPS, ops, dtype=dtype)
        self.norm2 = RMSNorm(vision.dim, TOWER_NORM_EPS, ops, dtype=dtype)
        self.attn = VisionAttention(vision, ops, dtype)
        self.mlp = VisionMLP(vision, dtype)

    def forward(self, x_NC: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        x_NC = x_NC + self.attn(self.norm1(x_NC), cos, sin, lengths)
        return x_NC + self.mlp(self.norm2(x_NC))


class VisionTower(torch.nn.Module):
    """Patches -> patch features [N, C]."""

    def __init__(self, vision: VisionConfig, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self._config = vision
        self.patch_embed = PatchEmbed(vision, dtype)
        self.blocks = torch.nn.ModuleList(VisionBlock(vision, ops, dtype) for _ in range(vision.n_layers))
        self.norm = RMSNorm(vision.dim, TOWER_NORM_EPS, ops, dtype=dtype)

    def forward(self, patches_NP: Tensor, grids: Sequence[Grid]) -> Tensor:
        """patches_NP: patches of all images one after the other, row-major inside each; grids: one per image."""
        vision = self._config
        tables = [vision_rope_table(rows, cols, vision.head_dim, vision.rope_theta) for rows, cols in grids]
        cos, sin = (torch.cat(parts).to(patches_NP.device) for parts in zip(*tables, strict=True))
        lengths = [rows * cols for rows, cols in grids]
        x = self.patch_embed(patches_NP)
        for block in self.blocks:
            x = block(x, cos, sin, lengths)
        return self.norm(x)


class Aligner(torch.nn.Module):
    """Tiles of patch features -> rows of the text network's width."""

    def __init__(self, vision: VisionConfig, hidden_size: int, ops: OpTable, dtype: torch.dtype) -> None:
        super().__init__()
        self._ops, self._tile = ops, vision.downsample_ratio
        self.w1 = Linear(vision.dim * vision.downsample_ratio**2, hidden_size, dtype=dtype, bias=True)
        self.w2 = Linear(hidden_size, hidden_size, dtype=dtype, bias=True)

    def forward(self, x_NC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[F, D]: rows of all images one after the other, raster order inside each."""
        parts = x_NC.split([rows * cols for rows, cols in grids])
        tiles = [
            self._ops.unfold_tiles(part, rows, cols, self._tile)
            for part, (rows, cols) in zip(parts, grids, strict=True)
        ]
        return self.w2(F.gelu(self.w1(torch.cat(tiles))))
