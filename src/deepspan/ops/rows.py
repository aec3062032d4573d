"""Rows of a sequence, wherever they lie: one after the other in a flat tensor, or in the blocks of a cache.

Attention and the indexer read rows of one sequence by their numbers in it (positions for raw rows, entry numbers for
compressed ones), so that complete sequences and cached ones mean the same. A kernel takes the fields.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspan.ops.rounding import pack_kv_rows, unpack_kv_rows


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
    """cache: [blocks, rows of a block, K]. tables: int64 [places, blocks of a sequence]. places: of each sequence.

    packed: (K, rotary dims) where the cache holds rows as bytes, uint8 [blocks, rows of a block, bytes]; they are read
    as fp32.
    """

    cache: Tensor
    tables: Tensor
    places: tuple[int, ...]
    packed: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.cache.dtype if self.packed is None else torch.float32

    def read(self, sequence: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of a sequence: [end - start, K]."""
        size = self.cache.shape[1]
        first = start // size
        blocks = self.tables[self.places[sequence], first : -(-end // size)]
        return self._unpacked(self.cache[blocks].flatten(0, 1)[start - first * size : end - first * size])

    def pick(self, sequence: int, numbers: Tensor) -> Tensor:
        """Rows by number, int64 [...]: [..., K]."""
        size = self.cache.shape[1]
        blocks = self.tables[self.places[sequence]][numbers // size]
        return self._unpacked(self.cache[blocks, numbers % size])

    def _unpacked(self, rows: Tensor) -> Tensor:
        return rows if self.packed is None else unpack_kv_rows(rows, *self.packed)


def store_rows(new_NK: Tensor, cache: Tensor, slots_N: Tensor, rope_dims: int) -> None:
    """Write rows to their slots, int64, of a cache [blocks, rows of a block, K], or of bytes if it is uint8."""
    is_packed = cache.dtype == torch.uint8
    cache.flatten(0, 1)[slots_N] = pack_kv_rows(new_NK, rope_dims) if is_packed else new_NK.to(cache.dtype)


Rows = FlatRows | PagedRows
