"""Routing and experts: the golden vector of the release, the rules for text and image rows, and loops."""

import math

import numpy as np
import pytest
import torch

from deepspan.ops.experts import clamped_swiglu, routed_experts
from deepspan.ops.router import route

NUM_EXPERTS, NUM_ACTIVE, HIDDEN, SCALING = 8, 2, 16, 1.5
SENTINEL_BASE = 129257


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def some_rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return normal(num_rows, HIDDEN, seed=seed)


GATE = normal(NUM_EXPERTS, HIDDEN, seed=90) / 4
BIAS, BIAS_VL = 0.3 * normal(NUM_EXPERTS, seed=91), 0.3 * normal(NUM_EXPERTS, seed=92)
TABLE = torch.from_numpy(np.random.default_rng(93).random((32, NUM_EXPERTS)).argsort(axis=1)[:, :NUM_ACTIVE].copy())


def choose(x, is_image, ids, *, bias=BIAS, bias_vl=BIAS_VL, table=None):
    return route(x, GATE, bias, bias_vl, torch.tensor(is_image), table, torch.tensor(ids), NUM_ACTIVE, SCALING)


def scores_of(row: torch.Tensor) -> list[float]:
    logits = (GATE.double() @ row.double()).tolist()
    return [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]


def best(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:NUM_ACTIVE]


# --- golden vector ----------------------------------------------------------------------------------------------


def golden_route(scaling: float) -> tuple[list[list[int]], list[list[float]]]:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    table = torch.zeros(8, 2, dtype=torch.int64)
    table[7] = torch.tensor([1, 3])
    ids = torch.tensor([7, SENTINEL_BASE, SENTINEL_BASE + 2])
    bias_vl = torch.tensor([0.0, 0.0, 10.0, 0.0])
    is_image = torch.tensor([False, True, True])
    experts, weights = route(logits, torch.eye(4), None, bias_vl, is_image, table, ids, 2, scaling)
    return experts.tolist(), weights.tolist()


@pytest.mark.parametrize(
    ("scaling", "golden"),
    [
        (1.0, [[0.3963, 0.6037], [0.3963, 0.6037], [0.4551, 0.5449]]),
        (1.5, [[0.5944, 0.9056], [0.5944, 0.9056], [0.6827, 0.8173]]),
    ],
)
def test_route_of_mixed_rows_in_hash_layer_equals_golden_vector(scaling, golden):
    experts, weights = golden_route(scaling)
    assert experts == [[1, 3], [2, 0], [2, 3]]
    for found, expected in zip(weights, golden, strict=True):
        assert found == pytest.approx(expected, abs=6e-5)


# --- selection --------------------------------------------------------------------------------------------------


def test_route_in_scored_layer_takes_best_biased_scores_by_kind():
    x = some_rows(40)
    is_image = [t % 3 == 0 for t in range(40)]
    experts, weights = choose(x, is_image, [0] * 40)
    for t in range(40):
        scores = scores_of(x[t])
        bias = BIAS_VL if is_image[t] else BIAS
        expected = best([score + float(b) for score, b in zip(scores, bias, strict=True)])
        assert experts[t].tolist() == expected
        total = sum(scores[e] for e in expected)
        assert weights[t].tolist() == pytest.approx([SCALING * scores[e] / total for e in expected], abs=1e-5)


def test_route_in_hash_layer_takes_table_for_text_and_scores_for_images():
    x, ids = some_rows(30), [t % 32 for t in range(30)]
    is_image = [t % 2 == 1 for t in range(30)]
    experts, _ = choose(x, is_image, ids, bias=None, table=TABLE)
    for t in range(30):
        expected = TABLE[ids[t]].tolist()
        if is_image[t]:
            expected = best([score + float(b) for score, b in zip(scores_of(x[t]), BIAS_VL, strict=True)])
        assert experts[t].tolist() == expected


def test_route_of_image_rows_does_not_read_their_ids():
    """Any id will do, even one far outside the table."""
    x = some_rows(5)
    first = choose(x, [True] * 5, [0] * 5, bias=None, table=TABLE)
    second = choose(x, [True] * 5, [SENTINEL_BASE + kind for kind in range(5)], bias=None, table=TABLE)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("is_hash", [False, True])
def test_route_of_text_rows_is_bit_equal_with_and_without_image_rows(is_hash):
    x, ids = some_rows(20), list(range(20))
    is_image = [t >= 12 for t in range(20)]
    table, bias = (TABLE, None) if is_hash else (None, BIAS)
    mixed = choose(x, is_image, ids, bias=bias, table=table)
    all_text = choose(x, [False] * 20, ids, bias=bias, table=table)
    text_model = choose(x, [False] * 20, ids, bias=bias, bias_vl=None, table=table)
    for other in (all_text, text_model):
        for found, expected in zip(mixed, other, strict=True):
            assert torch.equal(found[:12], expected[:12])
    alone = choose(x[:12], [False] * 12, ids[:12], bias=bias, table=table)
    assert torch.equal(alone[0], mixed[0][:12])
    assert torch.allclose(alone[1], mixed[1][:12], atol=1e-6)


def test_route_of_equal_scores_takes_lower_experts():
    experts, weights = route(
        torch.zeros(3, 4), torch.zeros(6, 4), torch.zeros(6), None, torch.zeros(3, dtype=torch.bool), None,
        torch.zeros(3, dtype=torch.int64), 3, 1.5,
    )  # fmt: skip
    assert experts.tolist() == [[0, 1, 2]] * 3
    assert weights.flatten().tolist() == pytest.approx([0.5] * 9)


# --- weights ----------------------------------------------------------------------------------------------------


def test_route_bias_changes_choice_but_not_weights():
    x = some_rows(1)
    forced = torch.zeros(NUM_EXPERTS)
    forced[[3, 6]] = 100.0
    experts, weights = choose(x, [False], [0], bias=forced)
    assert sorted(experts[0].tolist()) == [3, 6]
    scores = scores_of(x[0])
    total = scores[3] + scores[6]
    assert weights[0].tolist() == pytest.approx([SCALING * scores[e] / total for e in experts[0].tolist()], abs=1e-5)
    doubled = choose(x, [False], [0], bias=2 * forced)
    assert torch.equal(doubled[1], weights)


@pytest.mark.parametrize("is_hash", [False, True])
def test_route_weights_sum_to_scaling(is_hash):
    x, is_image = some_rows(50, seed=4), [t % 4 == 0 for t in range(50)]
    _, weights = choose(x, is_image, [t % 32 for t in range(50)], table=TABLE if is_hash else None)
    assert weights.sum(-1).tolist() == pytest.approx([SCALING] * 50, abs=1e-5)
    assert float(weights.min()) > 0


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_route_of_large_logits_is_finite(size):
    """softplus must not overflow, and its square root must not vanish on the chosen."""
    _, weights = choose(40 * size * some_rows(20), [False] * 20, [0] * 20)
    assert bool(weights.isfinite().all())


def test_route_of_bfloat16_rows_scores_in_fp32():
    x = some_rows(20).bfloat16()
    assert torch.equal(choose(x, [False] * 20, [0] * 20)[1], choose(x.float(), [False] * 20, [0] * 20)[1])


# --- experts ----------------------------------------------------------------------------------------------------


def naive_swiglu(gate: float, up: float, limit: float) -> float:
    if limit > 0:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
    return gate / (1 + math.exp(-gate)) * up


@pytest.mark.parametrize("limit", [0.3, 10.0, 0.0, -1.0])
def test_clamped_swiglu_equals_naive_statement(limit):
    values = [-30.0, -1.0, -0.3, 0.0, 0.2, 0.3, 0.31, 5.0, 30.0]
    grid = torch.tensor([(gate, up) for gate in values for up in values])
    found = clamped_swiglu(grid[:, 0], grid[:, 1], limit)
    expected = [naive_swiglu(gate, up, limit) for gate, up in grid.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_clamped_swiglu_gate_has_no_lower_limit():
    low, clamped = torch.tensor([-5.0]), torch.tensor([-0.3])
    up = torch.ones(1)
    assert float(clamped_swiglu(low, up, 0.3)) == pytest.approx(-5.0 / (1 + math.exp(5.0)) * 0.3, rel=1e-5)
    assert float(clamped_swiglu(low, up, 0.3)) != pytest.approx(float(clamped_swiglu(clamped, up, 0.3)), rel=0.1)


@pytest.mark.parametrize("limit", [0.3, 10.0])
def test_routed_experts_equal_naive_loop(limit):
    x = some_rows(11)
    w1, w3 = ([normal(12, HIDDEN, seed=10 * i + e) for e in range(NUM_EXPERTS)] for i in (1, 2))
    w2 = [normal(HIDDEN, 12, seed=300 + e) for e in range(NUM_EXPERTS)]
    rng = np.random.default_rng(5)
    chosen = torch.from_numpy(np.stack([rng.permutation(NUM_EXPERTS - 1)[:NUM_ACTIVE] for _ in range(11)]))
    weights = normal(11, NUM_ACTIVE, seed=6)
    found = routed_experts(x, chosen, weights, w1, w3, w2, limit)  # the last expert is never chosen
    for t in range(11):
        expected = np.zeros(HIDDEN)
        for e, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            row = x[t].double().numpy()
            gate, up = w1[e].double().numpy() @ row, w3[e].double().numpy() @ row
            hidden = np.array([naive_swiglu(g, u, limit) for g, u in zip(gate, up, strict=True)])
            expected += weight * (w2[e].double().numpy() @ hidden)
        assert np.abs(found[t].numpy() - expected).max() < 1e-5 * np.abs(expected).max() + 1e-5
    assert found.dtype == torch.float32
