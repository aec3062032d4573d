"""Rotary tables of one forward pass, made once and shared by all layers of a kind.

Window layers rotate plainly, compressed layers with YaRN, for everything in the layer: queries, raw rows, entries,
index queries and keys, and the rotation back of the output.
"""

import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.ops.rope import rope_frequencies, rope_table


class RopeTables:
    """cos and sin at given positions. Not a module: there is nothing to load, and `meta` models need none of it."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.device = device
        dims = config.qk_rope_head_dim
        self._frequencies = {
            compressed: rope_frequencies(config.rope, dims, compressed).float().to(device)
            for compressed in (False, True)
        }

    def at(self, positions: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [len(positions), R / 2]."""
        return rope_table(self._frequencies[compressed], positions)


class BatchRope:
    """Tables at the rows of one batch, computed on first use for each kind of layer."""

    def __init__(self, tables: RopeTables, positions: Tensor) -> None:
        self.tables, self._positions = tables, positions
        self._made: dict[bool, tuple[Tensor, Tensor]] = {}

    def rows(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._made:
            self._made[compressed] = self.tables.at(self._positions, compressed=compressed)
        return self._made[compressed]
