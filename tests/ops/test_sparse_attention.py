"""Sparse attention against a dense softmax written out row by row, for any intervals, entries and cuts into blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspan.ops import attention
from deepspan.ops.attention import sparse_attention
from deepspan.ops.blocks import QueryBlock
from deepspan.ops.rows import FlatRows, PagedRows, Rows

NUM_HEADS, DIM = 3, 8


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


class Problem:
    """Random queries, rows and entries of one sequence; [lo, hi] rows and [0, entry_hi) entries per query."""

    def __init__(self, num_queries: int, num_entries: int, num_selected: int | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.q, self.rows = normal(num_queries, NUM_HEADS, DIM, seed=seed), normal(num_queries, DIM, seed=seed + 1)
        self.sink = normal(NUM_HEADS, seed=seed + 2)
        self.entries = normal(num_entries, DIM, seed=seed + 3) if num_entries else None
        ends = np.sort(rng.integers(0, num_queries, (2, num_queries)), axis=0)
        self.lo, self.hi = torch.from_numpy(ends[0]), torch.from_numpy(ends[1])
        self.entry_hi = torch.from_numpy(rng.integers(0, num_entries + 1, num_queries))
        self.selected = None
        if num_selected is not None and num_entries:
            self.selected = torch.from_numpy(np.stack([self._pick(rng, t, num_selected) for t in range(num_queries)]))

    def _pick(self, rng: np.random.Generator, query: int, count: int) -> np.ndarray:
        """Up to `count` of the query's visible entries in any order, filled up with -1 in any place."""
        visible = rng.permutation(np.arange(int(self.entry_hi[query])))[:count]
        picked = np.concatenate((visible, np.full(count - len(visible), -1)))
        return rng.permutation(picked).astype(np.int64)

    def blocks(self, size: int) -> list[QueryBlock]:
        """Cuts of `size` queries with the tightest bounds."""
        starts = range(0, len(self.q), size)
        parts = [slice(first, min(first + size, len(self.q))) for first in starts]
        return [
            QueryBlock(
                sequence=0,
                queries=(part.start, part.stop),
                rows=(int(self.lo[part].min()), int(self.hi[part].max()) + 1),
                num_entries=int(self.entry_hi[part].max()),
            )
            for part in parts
        ]

    def run(self, blocks: list[QueryBlock], scale: float = 0.3) -> np.ndarray:
        return self.attend(blocks, scale).float().numpy()

    def attend(self, blocks: list[QueryBlock], scale: float = 0.3) -> torch.Tensor:
        return sparse_attention(
            self.q, self.view(self.rows), self.lo, self.hi, self.view(self.entries), self.entry_hi, self.selected,
            self.sink, scale, blocks,
        )  # fmt: skip

    def view(self, rows: torch.Tensor | None) -> Rows | None:
        return None if rows is None else FlatRows(rows=rows, firsts=(0,))

    def visible(self, query: int) -> list[np.ndarray]:
        keys = [self.rows[i] for i in range(int(self.lo[query]), int(self.hi[query]) + 1)]
        if self.entries is not None:
            chosen = range(int(self.entry_hi[query]))
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


@pytest.fixture(params=[1, 10**6], ids=["pick", "mask"])
def way(request, monkeypatch):
    """Both ways of reading chosen entries."""
    monkeypatch.setattr(attention, "PICK_FACTOR", request.param)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_queries=st.integers(1, 40),
    num_entries=st.integers(0, 12),
    num_selected=st.one_of(st.none(), st.integers(1, 6)),
    block=st.integers(1, 45),
    seed=st.integers(0, 1000),
)
def test_sparse_attention_equals_dense_softmax(way, num_queries, num_entries, num_selected, block, seed):
    problem = Problem(num_queries, num_entries, num_selected, seed)
    assert np.abs(problem.run(problem.blocks(block)) - problem.expected()).max() < 2e-6


class PagedProblem(Problem):
    """The same rows in blocks of a cache, in any order, among rows of others."""

    def view(self, rows: torch.Tensor | None) -> Rows | None:
        if rows is None:
            return None
        rng, size = np.random.default_rng(9), 3
        num_blocks = -(-len(rows) // size)
        table = torch.from_numpy(rng.permutation(num_blocks + 4)[:num_blocks])
        cache = normal(num_blocks + 4, size, DIM, seed=10).to(rows.dtype)
        padded = torch.cat((rows, rows.new_zeros(num_blocks * size - len(rows), DIM)))
        cache[table] = padded.unflatten(0, (num_blocks, size))
        return PagedRows(cache=cache, tables=torch.stack((torch.zeros_like(table), table)), places=(1,))


@pytest.mark.parametrize("selected", [None, 3])
@pytest.mark.parametrize("block", [1, 4, 40])
def test_sparse_attention_of_paged_rows_equals_flat_rows(way, selected, block):
    flat, paged = Problem(30, 11, selected, seed=2), PagedProblem(30, 11, selected, seed=2)
    assert np.abs(flat.run(flat.blocks(block)) - paged.run(paged.blocks(block))).max() < 1e-6


def test_sparse_attention_of_few_scores_at_a_time_is_unchanged(monkeypatch):
    problem = Problem(20, 6, 3, seed=5)
    whole = problem.run(problem.blocks(20))
    monkeypatch.setattr(attention, "MAX_SCORES", 100)
    assert np.abs(problem.run(problem.blocks(20)) - whole).max() < 1e-6


def test_sparse_attention_with_wider_bounds_is_unchanged():
    problem = Problem(20, 6, 3, seed=5)
    tight = problem.run(problem.blocks(20))
    whole = problem.run([QueryBlock(sequence=0, queries=(0, 20), rows=(0, 20), num_entries=6)])
    assert np.abs(tight - whole).max() < 1e-6


def test_sparse_attention_of_only_the_row_itself_shares_with_sink():
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    sink = torch.tensor([0.0, 1e9, -1e9])
    found = sparse_attention(
        torch.zeros(1, 3, 4), FlatRows(rows=row, firsts=(0,)), zero, zero, None, zero, None, sink, 0.5,
        [QueryBlock(sequence=0, queries=(0, 1), rows=(0, 1), num_entries=0)],
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
    np.testing.assert_allclose(problem.run(problem.blocks(10)), without.run(without.blocks(10)), rtol=0, atol=1e-5)


def test_sparse_attention_of_bfloat16_scores_in_fp32():
    problem = Problem(12, 4, None, seed=8)
    for name in ("q", "rows", "entries"):
        setattr(problem, name, getattr(problem, name).bfloat16().float())
    wide = torch.from_numpy(problem.run(problem.blocks(5)))
    for name in ("q", "rows", "entries"):
        setattr(problem, name, getattr(problem, name).bfloat16())
    found = problem.attend(problem.blocks(5))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.bfloat16())
