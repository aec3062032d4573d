"""Compressor pooling and the indexer's choice, against loops and by their borders."""

import numpy as np
import pytest
import torch

from deepspan.ops import indexer
from deepspan.ops.blocks import QueryBlock
from deepspan.ops.compress import compress_groups
from deepspan.ops.indexer import index_entries, index_scores, select_entries
from deepspan.ops.rows import FlatRows
from deepspan.ops.topk import stable_topk

DIM = 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def naive_entries(kv: np.ndarray, gate: np.ndarray, ratio: int) -> np.ndarray:
    """One channel of one entry at a time."""
    overlaps = kv.shape[1] == 2 * DIM
    entries = np.zeros((len(kv) // ratio, DIM))
    for i in range(len(entries)):
        for channel in range(DIM):
            rows = [(t, DIM + channel if overlaps else channel) for t in range(i * ratio, (i + 1) * ratio)]
            if overlaps and i > 0:
                rows += [(t, channel) for t in range((i - 1) * ratio, i * ratio)]
            weights = np.exp([gate[at] for at in rows])
            entries[i, channel] = sum(w * kv[at] for w, at in zip(weights, rows, strict=True)) / weights.sum()
    return entries


# --- pooling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "width"), [(4, 2 * DIM), (16, DIM), (128, DIM), (4, DIM)])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_compress_groups_equals_naive_loops(ratio, width, extra):
    num_rows = 3 * ratio + extra
    kv, gate = normal(num_rows, width), 2 * normal(num_rows, width, seed=1)
    found = compress_groups(kv, gate, ratio, DIM)
    expected = naive_entries(kv.double().numpy(), gate.double().numpy(), ratio)
    assert found.shape == (3, DIM)
    assert np.abs(found.numpy() - expected).max() < 2e-6


@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("width", [DIM, 2 * DIM])
def test_compress_groups_of_incomplete_group_yields_nothing(num_rows, width):
    found = compress_groups(torch.zeros(num_rows, width), torch.zeros(num_rows, width), 4, DIM)
    assert found.shape == (0, DIM)


def test_compress_groups_with_overlap_pools_four_rows_first_and_eight_after():
    """Equal gates make each entry a plain mean of what it pools."""
    kv = normal(12, 2 * DIM)
    found = compress_groups(kv, torch.zeros_like(kv), 4, DIM)
    back, own = kv[:, :DIM], kv[:, DIM:]
    assert torch.allclose(found[0], own[:4].mean(0), atol=1e-6)
    assert torch.allclose(found[1], torch.cat((back[:4], own[4:8])).mean(0), atol=1e-6)
    assert torch.allclose(found[2], torch.cat((back[4:8], own[8:])).mean(0), atol=1e-6)


def test_compress_groups_weighs_every_channel_apart():
    kv, gate = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    assert compress_groups(kv, gate, 2, 2).tolist() == [[1.0, 2.0]]


def test_compress_groups_gradient_of_first_overlapping_entry_is_finite():
    """The absent group has gate -inf; its gradient must not be nan."""
    kv, gate = normal(8, 2 * DIM).requires_grad_(), normal(8, 2 * DIM, seed=1).requires_grad_()
    compress_groups(kv, gate, 4, DIM).square().sum().backward()
    assert bool(kv.grad.isfinite().all())
    assert bool(gate.grad.isfinite().all())


# --- index scores -----------------------------------------------------------------------------------------------


def test_index_scores_equal_naive_sum():
    q, k, weights = normal(5, 3, 8), normal(7, 8, seed=1), normal(5, 3, seed=2)
    found = index_scores(q, k, weights)
    for t in range(5):
        for n in range(7):
            dots = [float(q[t, h].double() @ k[n].double()) for h in range(3)]
            expected = sum(float(weights[t, h]) * max(dot, 0.0) for h, dot in enumerate(dots))
            assert float(found[t, n]) == pytest.approx(expected, abs=1e-5)


def test_index_scores_weights_are_signed():
    """The weight comes after the ReLU: a negative one lowers the score."""
    q, k = torch.ones(1, 1, 2), torch.ones(1, 2)
    assert index_scores(q, k, torch.tensor([[-3.0]])).tolist() == [[-6.0]]
    assert index_scores(-q, k, torch.tensor([[-3.0]])).tolist() == [[0.0]]


# --- selection --------------------------------------------------------------------------------------------------


def test_stable_topk_of_equal_values_takes_lower_indices():
    values = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert stable_topk(values, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_stable_topk_of_many_ties_takes_lower_indices():
    """Long rows too, where an unstable sort shows."""
    values = torch.zeros(2, 4096)
    values[1, 4000] = 1.0
    assert stable_topk(values, 512)[0].tolist() == list(range(512))
    assert stable_topk(values, 3)[1].tolist() == [4000, 0, 1]


def test_stable_topk_of_long_rows_equals_the_stable_sort():
    values = normal(6, 3000)
    values[:, ::3] = 0.0
    values[1] = -values[1]  # with negative zeros
    values[2] = -torch.inf
    values[3, :2990] = -torch.inf
    values[4] *= 1e-42  # denormal
    for k in (1, 20, 3000):
        expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(stable_topk(values, k), expected)


def test_select_entries_with_fewer_visible_than_topk_pads_with_minus_one():
    scores = torch.tensor([[5.0, 1.0, 3.0, 9.0]]).expand(4, 4)
    found = select_entries(scores, torch.tensor([0, 1, 3, 4]), 2)
    assert [sorted(row) for row in found.tolist()] == [[-1, -1], [-1, 0], [0, 2], [0, 3]]


def test_select_entries_never_takes_invisible_entries_however_high():
    scores = torch.arange(64.0).expand(3, 64)
    for row, last in zip(select_entries(scores, torch.tensor([13, 5, 60]), 8).tolist(), (13, 5, 60), strict=True):
        chosen = [entry for entry in row if entry >= 0]
        assert sorted(chosen) == list(range(max(0, last - 8), last))


def test_select_entries_of_zero_scores_takes_oldest():
    found = select_entries(torch.zeros(1, 32), torch.tensor([32]), 6)
    assert sorted(found[0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_select_entries_with_topk_above_entries_returns_all_visible():
    found = select_entries(normal(1, 5), torch.tensor([5]), 512)
    assert sorted(found[0].tolist()) == [0, 1, 2, 3, 4]


def test_select_entries_against_sorted_python_lists():
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 4, (40, 25)).astype(np.float32)  # many ties
    ends = rng.integers(0, 26, 40)
    found = select_entries(torch.from_numpy(scores), torch.from_numpy(ends), 7)
    for row, score, last in zip(found.tolist(), scores, ends, strict=True):
        expected = sorted(range(last), key=lambda i, score=score: (-score[i], i))[:7]
        assert [entry for entry in row if entry >= 0] == expected


# --- scores and selection, block by block -----------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 30])
def test_index_entries_of_any_blocks_equal_choice_over_all_scores(block, monkeypatch):
    """Two sequences of 17 and 13 queries with 9 and 6 entries: no entry of the other one is ever chosen."""
    q, k, weights = normal(30, 3, 8), normal(15, 8, seed=1), normal(30, 3, seed=2)
    lo = [0] * 17 + [9] * 13
    hi = torch.tensor([(t + 1) // 2 if t < 17 else (t - 16) // 2 for t in range(30)])
    blocks = [
        QueryBlock(sequence=sequence, queries=(first, last), rows=(0, 0), num_entries=int(hi[last - 1]))
        for sequence, (start, end) in enumerate(((0, 17), (17, 30)))
        for first, last in ((at, min(at + block, end)) for at in range(start, end, block))
    ]
    monkeypatch.setattr(indexer, "MAX_SCORES", 50)  # a few keys at a time
    found = index_entries(q, FlatRows(rows=k, firsts=(0, 9)), weights, hi, 4, blocks)
    assert found.shape == (30, 4)
    scores = index_scores(q, k, weights)
    for t, row in enumerate(found.tolist()):
        mine = scores[t, lo[t] :]
        expected = sorted(range(int(hi[t])), key=lambda i, mine=mine: (-float(mine[i]), i))[:4]
        assert [entry for entry in row if entry >= 0] == expected


def test_index_entries_carry_no_gradient():
    q = normal(2, 3, 8).requires_grad_()
    keys = FlatRows(rows=normal(3, 8), firsts=(0,))
    blocks = [QueryBlock(sequence=0, queries=(0, 2), rows=(0, 0), num_entries=3)]
    assert not index_entries(q, keys, normal(2, 3), torch.full((2,), 3), 2, blocks).requires_grad
