"""Sparse attention against a dense softmax written out row by row, for any intervals, entries and cuts into blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspan.ops.attention import sparse_attention
from deepspan.ops.blocks import QueryBlock

NUM_HEADS, DIM = 3, 8


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


class Problem:
    """Random queries, rows and entries of one sequence; [lo, hi] rows and [entry_lo, entry_hi) entries per query."""

    def __init__(self, num_queries: int, num_entries: int, num_selected: int | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.q, self.rows = normal(num_queries, NUM_HEADS, DIM, seed=seed), normal(num_queries, DIM, seed=seed + 1)
        self.sink = normal(NUM_HEADS, seed=seed + 2)
        self.entries = normal(num_entries, DIM, seed=seed + 3) if num_entries else None
        ends = np.sort(rng.integers(0, num_queries, (2, num_queries)), axis=0)
        self.lo, self.hi = torch.from_numpy(ends[0]), torch.from_numpy(ends[1])
        entry_ends = np.sort(rng.integers(0, num_entries + 1, (2, num_queries)), axis=0)
        self.entry_lo, self.entry_hi = torch.from_numpy(entry_ends[0]), torch.from_numpy(entry_ends[1])
        self.selected = None
        if num_selected is not None and num_entries:
            self.selected = torch.from_numpy(np.stack([self._pick(rng, t, num_selected) for t in range(num_queries)]))

    def _pick(self, rng: np.random.Generator, query: int, count: int) -> np.ndarray:
        """Up to `count` of the query's visible entries in any order, filled up with -1 in any place."""
        visible = rng.permutation(np.arange(int(self.entry_lo[query]), int(self.entry_hi[query])))[:count]
        picked = np.concatenate((visible, np.full(count - len(visible), -1)))
        return rng.permutation(picked).astype(np.int64)

    def blocks(self, size: int) -> list[QueryBlock]:
        """Cuts of `size` queries with the tightest bounds."""
        starts = range(0, len(self.q), size)
        parts = [slice(first, min(first + size, len(self.q))) for first in starts]
        return [
            QueryBlock(
                queries=(part.start, part.stop),
                rows=(int(self.lo[part].min()), int(self.hi[part].max()) + 1),
                entries=(int(self.entry_lo[part].min()), int(self.entry_hi[part].max())),
            )
            for part in parts
        ]

    def run(self, blocks: list[QueryBlock], scale: float = 0.3) -> np.ndarray:
        found = sparse_attention(
            self.q, self.rows, self.lo, self.hi, self.entries, self.entry_lo, self.entry_hi, self.selected,
            self.sink, scale, blocks,
        )  # fmt: skip
        return found.numpy()

    def visible(self, query: int) -> list[np.ndarray]:
        keys = [self.rows[i] for i in range(int(self.lo[query]), int(self.hi[query]) + 1)]
        if self.entries is not None:
            chosen = range(int(self.entry_lo[query]), int(self.entry_hi[query]))
            if self.selected is not None:
                chosen = [i for i in chosen if i in self.selected[query].tolist()]
            keys += [self.entries[i] for i in chosen]
        return [key.double().numpy() for key in keys]

    def expected(self, scale: float = 0.3) -> np.ndarray:
        out = np.zeros(self.q.shape)
        for t, head in np.ndindex(len(self.q), NUM_HEADS):
            keys = self.visible(t)
            weights = [math.exp(scale * float(self.q[t, head].double().numpy() @ key)) for key in keys]
            total = sum(weights) + math.exp(float(self.sink[head]))
            out[t, head] = sum(w * key for w, key in zip(weights, keys, strict=True)) / total
        return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_queries=st.integers(1, 40),
    num_entries=st.integers(0, 12),
    num_selected=st.one_of(st.none(), st.integers(1, 6)),
    block=st.integers(1, 45),
    seed=st.integers(0, 1000),
)
def test_sparse_attention_equals_dense_softmax(num_queries, num_entries, num_selected, block, seed):
    problem = Problem(num_queries, num_entries, num_selected, seed)
    assert np.abs(problem.run(problem.blocks(block)) - problem.expected()).max() < 2e-6


def test_sparse_attention_with_wider_bounds_is_unchanged():
    problem = Problem(20, 6, 3, seed=5)
    tight = problem.run(problem.blocks(20))
    whole = problem.run([QueryBlock(queries=(0, 20), rows=(0, 20), entries=(0, 6))])
    assert np.abs(tight - whole).max() < 1e-6


def test_sparse_attention_of_only_the_row_itself_shares_with_sink():
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    sink = torch.tensor([0.0, 1e9, -1e9])
    found = sparse_attention(
        torch.zeros(1, 3, 4), row, zero, zero, None, zero, zero, None, sink, 0.5,
        [QueryBlock(queries=(0, 1), rows=(0, 1), entries=(0, 0))],
    )  # fmt: skip
    assert found[0].tolist() == [[0.5, 1.0, 1.5, 2.0], [0.0] * 4, [1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_sparse_attention_of_large_scores_is_finite(size):
    problem = Problem(10, 4, None, seed=6)
    problem.q = problem.q * size
    assert np.all(np.isfinite(problem.run(problem.blocks(4))))


def test_sparse_attention_where_nothing_is_selected_ignores_entries():
    problem = Problem(10, 4, 2, seed=7)
    problem.selected = torch.full_like(problem.selected, -1)
    without = Problem(10, 4, 2, seed=7)
    without.entries = without.selected = None
    assert np.array_equal(np.round(problem.run(problem.blocks(10)), 5), np.round(without.run(without.blocks(10)), 5))


def test_sparse_attention_of_bfloat16_scores_in_fp32():
    problem = Problem(12, 4, None, seed=8)
    for name in ("q", "rows", "entries"):
        setattr(problem, name, getattr(problem, name).bfloat16().float())
    wide = torch.from_numpy(problem.run(problem.blocks(5)))
    for name in ("q", "rows", "entries"):
        setattr(problem, name, getattr(problem, name).bfloat16())
    found = sparse_attention(
        problem.q, problem.rows, problem.lo, problem.hi, problem.entries, problem.entry_lo, problem.entry_hi, None,
        problem.sink, 0.3, problem.blocks(5),
    )  # fmt: skip
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.bfloat16())
