"""Rows of a sequence, wherever they lie: one after the other in a flat tensor, or in the blocks of a cache.

Attention and the indexer read rows of one sequence by their numbers in it (positions for raw rows, entry numbers for
compressed ones), so that complete sequences and cached ones mean the same. A kernel takes the fields.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRows:
    """rows: [S, K], sequences one after the other. firsts: index of each sequence's row 0."""

    rows: Tensor
    firsts: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def read(self, sequence: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of a sequence: [end - start, K]."""
        first = self.firsts[sequence]
        return self.rows[first + start : first + end]

    def pick(self, sequence: int, numbers: Tensor) -> Tensor:
        """Rows by number, int64 [...]: [..., K]."""
        return self.rows[numbers + self.firsts[sequence]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """cache: [blocks, rows of a block, K]. tables: int64 [places, blocks of a sequence]. places: of each sequence."""

    cache: Tensor
    tables: Tensor
    places: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.cache.dtype

    def read(self, sequence: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of a sequence: [end - start, K]."""
        size = self.cache.shape[1]
        first = start // size
        blocks = self.tables[self.places[sequence], first : -(-end // size)]
        return self.cache[blocks].flatten(0, 1)[start - first * size : end - first * size]

    def pick(self, sequence: int, numbers: Tensor) -> Tensor:
        """Rows by number, int64 [...]: [..., K]."""
        size = self.cache.shape[1]
        blocks = self.tables[self.places[sequence]][numbers // size]
        return self.cache[blocks, numbers % size]


Rows = FlatRows | PagedRows
