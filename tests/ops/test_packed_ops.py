"""Ops over packed weights: against float64 and exact integers, whatever the tiles; what is not finite stays visible."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from deepspan.ops import packed
from deepspan.ops.experts import routed_experts
from deepspan.ops.formats import Packed, decode_fp4, decode_fp8, unpack_int4
from deepspan.ops.packed import (
    experts_fp4,
    experts_fp8,
    experts_int4,
    experts_int8,
    grouped_linear_fp8,
    int8_matmul,
    linear_fp8,
    linear_int8,
    linear_int8_static,
    quantise_tokens,
)
from deepspan.weights.quantise import quantise_fp4, quantise_fp8, quantise_int4, quantise_int8, static_tensors

HIDDEN, INTER, NUM_EXPERTS, NUM_ACTIVE, NUM_ROWS = 96, 64, 6, 2, 9


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def relative(found: torch.Tensor, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.fixture(params=[1 << 24, 300], ids=["one_tile", "many_tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(packed, "MAX_DECODED", request.param)


# --- block formats


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (300, 200), (5, 257)])
def test_linear_fp8_equals_float64(rows, columns, scale_dtype, tiles):
    weight, x = quantise_fp8(normal(rows, columns), scale_dtype), normal(7, columns, seed=1)
    expected = x.double().numpy() @ decode_fp8(weight).double().numpy().T
    assert relative(linear_fp8(x, weight), expected) < 1e-6
    found = linear_fp8(x.bfloat16(), weight)
    assert found.dtype == torch.bfloat16
    assert relative(found, expected) < 2e-2


def test_linear_fp8_never_decodes_more_than_a_tile(monkeypatch):
    seen = []

    def watch(weight, first=0, last=None):
        rows = decode_fp8(weight, first, last)
        seen.append(rows.numel())
        return rows

    monkeypatch.setattr(packed, "decode_fp8", watch)
    monkeypatch.setattr(packed, "MAX_DECODED", 1000)
    linear_fp8(normal(2, 100), quantise_fp8(normal(105, 100)))
    assert seen == [1000] * 10 + [500]


@pytest.mark.parametrize(("num_groups", "rank"), [(2, 128), (3, 50), (8, 16), (1, 130)])
def test_grouped_linear_fp8_takes_each_group_through_its_own_rows(num_groups, rank):
    weight, x = quantise_fp8(normal(num_groups * rank, 140)), normal(5, num_groups, 140, seed=2)
    matrices = decode_fp8(weight).double().numpy().reshape(num_groups, rank, 140)
    expected = np.einsum("tgk,grk->tgr", x.double().numpy(), matrices)
    assert relative(grouped_linear_fp8(x, weight), expected) < 1e-6


# --- integers


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(3, 8192, 5), (1, 1, 1), (4, 1025, 7), (2, 1024, 3)])
def test_int8_matmul_is_exact_at_the_extremes(rows, columns, outputs, tiles):
    """All products of one sign and full size: any rounding on the way would show."""
    a = torch.full((rows, columns), -128, dtype=torch.int8)
    a[:, ::7] = 127
    b = torch.full((outputs, columns), -128, dtype=torch.int8)
    b[0, ::3] = 1
    found = int8_matmul(a, b)
    assert found.dtype == torch.int32
    assert np.array_equal(found.numpy(), a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T)


def test_int8_matmul_of_random_integers_is_exact(tiles):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((11, 4099), (13, 4099)))
    found = int8_matmul(torch.from_numpy(a), torch.from_numpy(b))
    assert np.array_equal(found.numpy(), a.astype(np.int64) @ b.astype(np.int64).T)


def test_quantise_tokens_rounds_ties_to_even_with_a_scale_per_row():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -126.5], [12.7, 0.05, 0.0, -12.7, 1.0, 0.04]])
    values, scale = quantise_tokens(x)
    assert values[0].tolist() == [127, 0, 2, 2, 0, -126]
    assert scale.flatten().tolist() == pytest.approx([1.0, 0.1])
    assert values[1].tolist()[2:5] == [0, -127, 10]
    assert values.dtype == torch.int8


def test_quantise_tokens_of_zeros_is_zeros():
    values, scale = quantise_tokens(torch.zeros(2, 4))
    assert values.tolist() == [[0] * 4] * 2
    assert bool(scale.isfinite().all())


def float64_int8(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Per token: round to 127 steps, integer products, both scales. Rounds with the fp32 scale, as the format says."""
    token = (np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)).astype(np.float32)
    rounded = np.clip(np.round(x.astype(np.float32) / token), -128, 127)
    return (
        (rounded.astype(np.float64) @ values.astype(np.float64).T) * token.astype(np.float64) * scale.astype(np.float64)
    )


@pytest.mark.parametrize("flat_scale", [False, True])
def test_linear_int8_equals_the_formula(flat_scale, tiles):
    weight, x = quantise_int8(normal(33, 2100)), normal(6, 2100, seed=4)
    expected = float64_int8(x.numpy(), weight.values.numpy(), weight.scale.flatten().numpy())
    stored = Packed(weight.values, weight.scale.flatten()) if flat_scale else weight
    assert relative(linear_int8(x, stored), expected) < 1e-6


def test_linear_int8_in_bf16_gives_bf16():
    weight, x = quantise_int8(normal(33, 64)), normal(6, 64, seed=4).bfloat16()
    expected = float64_int8(x.float().numpy(), weight.values.numpy(), weight.scale.flatten().numpy())
    found = linear_int8(x, weight)
    assert found.dtype == torch.bfloat16
    assert relative(found, expected) < 1e-2


def test_linear_int8_of_a_row_does_not_depend_on_other_rows():
    weight, x = quantise_int8(normal(33, 200)), normal(6, 200, seed=4)
    x[3] *= 1000
    assert torch.equal(linear_int8(x, weight)[2:3], linear_int8(x[2:3], weight))


@pytest.mark.parametrize(
    ("op", "bad"),
    # A fixed rounding limits what is too large, infinities too: that is its meaning.
    [("dynamic", torch.nan), ("dynamic", torch.inf), ("dynamic", -torch.inf), ("static", torch.nan)],
)
def test_linear_int8_of_a_row_that_is_not_finite_is_nan_in_that_row_alone(op, bad):
    x = normal(3, 64)
    x[1, 5] = bad
    if op == "dynamic":
        found = linear_int8(x, quantise_int8(normal(8, 64)))
    else:
        found = linear_int8_static(x, *static_tensors(normal(8, 64), 0.05, 3, None).values())
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.parametrize("offset", [0, 7, -20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_int8_static_equals_exact_fractions(offset, with_bias):
    matrix, x = normal(5, 40), normal(4, 40, seed=7) * 2
    bias = normal(5, seed=8) if with_bias else None
    tensors = static_tensors(matrix, 0.03125, offset, bias)  # a power of two, so that rounding is exact in fp32
    found = linear_int8_static(x, *tensors.values())
    rounded = np.clip(np.round(x.double().numpy() / 0.03125) + offset, -128, 127).astype(int)
    for t in range(4):
        for n in range(5):
            total = int(rounded[t] @ tensors["weight"][n].numpy().astype(int)) + int(tensors["quant_bias"][n])
            expected = Fraction(total) * Fraction(float(tensors["deq_scale"][n]))
            assert float(found[t, n]) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("offset", [0, 11])
def test_linear_int8_static_is_close_to_the_plain_layer(offset):
    matrix, x, bias = normal(24, 128), normal(6, 128, seed=7), normal(24, seed=8)
    tensors = static_tensors(matrix, 4 / 127, offset, bias)
    expected = x.double().numpy() @ matrix.double().numpy().T + bias.double().numpy()
    assert relative(linear_int8_static(x, *tensors.values()), expected) < 0.03


# --- experts


def expert_case():
    rng = np.random.default_rng(5)
    x = normal(NUM_ROWS, HIDDEN)
    chosen = torch.from_numpy(np.stack([rng.permutation(NUM_EXPERTS - 1)[:NUM_ACTIVE] for _ in range(NUM_ROWS)]))
    weights = torch.from_numpy(rng.random((NUM_ROWS, NUM_ACTIVE), dtype=np.float32)) + 0.2
    w1, w3 = ([normal(INTER, HIDDEN, seed=10 * i + e) / 4 for e in range(NUM_EXPERTS)] for i in (1, 2))
    w2 = [normal(HIDDEN, INTER, seed=300 + e) / 4 for e in range(NUM_EXPERTS)]
    return x, chosen, weights, w1, w3, w2


@pytest.mark.parametrize(
    ("op", "quantise", "decode"),
    [
        (experts_fp4, quantise_fp4, decode_fp4),
        (experts_fp8, quantise_fp8, decode_fp8),
        (experts_fp8, lambda w: quantise_fp8(w, torch.float32), decode_fp8),
    ],
    ids=["fp4", "fp8", "fp8_fp32_scales"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_experts_in_blocks_equal_the_plain_op_on_decoded_weights(op, quantise, decode, dtype, limit):
    x, chosen, weights, *matrices = expert_case()
    kept = [[quantise(w) for w in group] for group in matrices]
    plain = [[decode(w).to(dtype) for w in group] for group in kept]
    found = op(x.to(dtype), chosen, weights, *kept, limit)
    assert torch.equal(found, routed_experts(x.to(dtype), chosen, weights, *plain, limit))
    assert found.dtype == torch.float32


@pytest.mark.parametrize("limit", [0.5, 10.0])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_in_integers_equal_the_formula(name, limit):
    """The clamp reaches the quantised path; activations are rounded again, per token, before the second projection."""
    x, chosen, weights, *matrices = expert_case()
    quantise, op = {"int8": (quantise_int8, experts_int8), "int4": (quantise_int4, experts_int4)}[name]
    kept = [[quantise(w) for w in group] for group in matrices]
    found = op(x, chosen, weights, *kept, limit)

    def project(rows: np.ndarray, weight: Packed) -> np.ndarray:
        values = weight.values if name == "int8" else unpack_int4(weight.values)
        return float64_int8(rows, values.numpy(), weight.scale.flatten().numpy())

    expected = np.zeros((NUM_ROWS, HIDDEN))
    for t in range(NUM_ROWS):
        for e, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (project(x[t : t + 1].numpy(), group[e]) for group in kept[:2])
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            expected[t] += weight * project(gate / (1 + np.exp(-gate)) * up, kept[2][e])[0]
    # A hidden value within rounding of a middle may go either way: one step of one product at most.
    assert relative(found, expected) < 2e-3
    assert np.median(np.abs(found.double().numpy() - expected)) < 1e-6 * np.abs(expected).max()


def test_experts_in_integers_of_a_row_do_not_depend_on_other_rows():
    x, chosen, weights, *matrices = expert_case()
    kept = [[quantise_int8(w) for w in group] for group in matrices]
    everything = experts_int8(x, chosen, weights, *kept, 10.0)
    assert torch.equal(everything[4:5], experts_int8(x[4:5], chosen[4:5], weights[4:5], *kept, 10.0))


# --- choosing quantised values


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_quantise_fp8_has_the_error_of_the_format_and_finds_its_own_grid_again(scale_dtype):
    weight = normal(300, 260)
    weight[:128, :128] *= 1000
    weight[128:256, 128:256] = 0
    kept = quantise_fp8(weight, scale_dtype)
    decoded = decode_fp8(kept)
    assert kept.scale.shape == (3, 3)
    assert kept.scale.dtype == scale_dtype
    assert float((decoded - weight).norm() / weight.norm()) < 0.03
    assert float((decoded[:128, 128:] - weight[:128, 128:]).norm() / weight[:128, 128:].norm()) < 0.03
    assert torch.equal(decoded[128:256, 128:256], torch.zeros(128, 128))
    again = decode_fp8(quantise_fp8(decoded, scale_dtype))
    assert torch.equal(again, decoded) or scale_dtype == torch.float32


def test_quantise_fp4_has_the_error_of_the_format_and_finds_its_own_grid_again():
    weight = normal(64, 256) * torch.logspace(-3, 3, 64)[:, None]
    decoded = decode_fp4(quantise_fp4(weight))
    errors = (decoded - weight).norm(dim=1) / weight.norm(dim=1)
    assert 0.08 < float(errors.min()) < float(errors.max()) < 0.16
    assert torch.equal(decode_fp4(quantise_fp4(decoded)), decoded)


def test_quantise_int8_uses_all_steps_of_each_row():
    weight = normal(16, 256) * torch.logspace(-3, 3, 16)[:, None]
    kept = quantise_int8(weight)
    assert kept.values.abs().amax(dim=1).tolist() == [127] * 16
    assert float(((kept.values * kept.scale - weight).norm(dim=1) / weight.norm(dim=1)).max()) < 0.01
    assert bool(quantise_int8(torch.zeros(2, 4)).scale.isfinite().all())


def test_quantise_int4_uses_all_steps_of_each_row():
    weight = normal(16, 256) * torch.logspace(-3, 3, 16)[:, None]
    kept = quantise_int4(weight)
    values = unpack_int4(kept.values)
    assert kept.values.shape == (8, 256)
    assert values.abs().amax(dim=1).tolist() == [7] * 16
    assert float(((values * kept.scale - weight).norm(dim=1) / weight.norm(dim=1)).max()) < 0.2


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40])
def test_linear_int8_of_a_row_of_nothing_is_nothing(size):
    x = normal(3, 64)
    x[1] = size
    found = linear_int8(x, quantise_int8(normal(8, 64)))
    assert float(found[1].abs().max()) < 1e-37
    assert bool(found.isfinite().all())
