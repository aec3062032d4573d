"""Rounding of activations and cached rows: bit for bit the rules of the release, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from deepspan.config.engine import packed_row_bytes
from deepspan.ops.rounding import (
    hadamard,
    pack_kv_rows,
    round_index_rows,
    round_inputs,
    round_kv_rows,
    unpack_kv_rows,
)

E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m) * Fraction(2) ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]
E2M1 = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def exact_qdq(values: list[float], grid: list[Fraction], floor: Fraction) -> tuple[list[float], int]:
    """One group by the rules, in fractions: its rounded values, and the exponent of its scale."""
    largest = max(*(abs(Fraction(value)) for value in values), floor) / grid[-1]
    exponent = math.ceil(math.log2(largest))
    while Fraction(2) ** (exponent - 1) >= largest:
        exponent -= 1
    while Fraction(2) ** exponent < largest:
        exponent += 1
    scale = Fraction(2) ** exponent
    result = []
    for value in values:
        size = min(abs(Fraction(value)) / scale, grid[-1])
        code = min(range(len(grid)), key=lambda c: (abs(grid[c] - size), c % 2))
        result.append(math.copysign(float(grid[code] * scale), value))
    return result, exponent


def exact_rows(rows: torch.Tensor, group: int, grid: list[Fraction], floor: Fraction) -> np.ndarray:
    return np.array(
        [
            [v for first in range(0, len(row), group) for v in exact_qdq(row[first : first + group], grid, floor)[0]]
            for row in rows.tolist()
        ],
        dtype=np.float32,
    )


FP8_FLOOR = Fraction(float(np.float32(1e-4)))
FP4_FLOOR = 6 * Fraction(2) ** -126


def rows_of(width: int, dtype: torch.dtype = torch.bfloat16, num_rows: int = 6) -> torch.Tensor:
    """Rows of very different sizes, with zeros, ties and the largest values of the formats among them."""
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((num_rows, width)) * np.array([1, 1e-6, 1e3, 30, 1, 0])[:num_rows, None]
    rows[3, :: max(1, width // 8)] = 448.0
    rows[4, :16] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    return torch.from_numpy(rows).to(dtype)


def assert_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bits, the sign of zero included."""
    assert np.array_equal(found.float().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 256, 200])
def test_round_inputs_is_bit_equal_to_the_rules(width, dtype):
    x = rows_of(width, dtype)
    found = round_inputs(x)
    assert found.dtype == dtype
    assert_bits(found, exact_rows(x, 128, E4M3, FP8_FLOOR))


def test_round_kv_rows_is_bit_equal_to_the_rules_and_leaves_rotary_dims():
    x = rows_of(512)
    found = round_kv_rows(x, 64)
    assert_bits(found[:, :448], exact_rows(x[:, :448], 64, E4M3, FP8_FLOOR))
    assert torch.equal(found[:, 448:], x[:, 448:])


def test_round_index_rows_is_bit_equal_to_the_rules():
    x = rows_of(128)
    found = round_index_rows(x)
    assert_bits(found, exact_rows(x, 32, E2M1, FP4_FLOOR))


@pytest.mark.parametrize("rounded", [round_inputs, lambda x: round_kv_rows(x, 64), round_index_rows])
def test_rounding_twice_is_rounding_once(rounded):
    once = rounded(rows_of(512))
    assert torch.equal(rounded(once), once)


def test_rounding_of_a_row_does_not_depend_on_other_rows():
    x = rows_of(512)
    assert torch.equal(round_kv_rows(x, 64)[2:3], round_kv_rows(x[2:3], 64))


# --- the packed row


def test_packed_row_of_the_release_has_584_bytes():
    assert packed_row_bytes(512, 64) == 584


def test_packed_row_holds_values_then_rotary_dims_then_scales_then_zeros():
    x = rows_of(512)
    packed = pack_kv_rows(x, 64)
    assert packed.shape == (6, 584)
    assert packed.dtype == torch.uint8
    for row, bytes_ in zip(x.tolist(), packed.numpy(), strict=True):
        for group in range(7):
            numbers, exponent = exact_qdq(row[64 * group : 64 * group + 64], E4M3, FP8_FLOOR)
            assert bytes_[576 + group] == exponent + 127
            for number, code in zip(numbers, bytes_[64 * group : 64 * group + 64].tolist(), strict=True):
                assert E4M3[code & 0x7F] * Fraction(2) ** exponent == abs(Fraction(number))
                assert (code >> 7) == (math.copysign(1, number) < 0)
        assert bytes_[583] == 0
    assert torch.equal(packed[:, 448:576].contiguous().view(torch.bfloat16), x[:, 448:])


@pytest.mark.parametrize(("width", "rope_dims"), [(512, 64), (32, 8), (136, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_row_is_the_rounded_one(width, rope_dims, dtype):
    x = rows_of(width, dtype)
    packed = pack_kv_rows(x, rope_dims)
    assert packed.shape[1] == packed_row_bytes(width, rope_dims)
    found, expected = unpack_kv_rows(packed, width, rope_dims), round_kv_rows(x, rope_dims).float()
    assert torch.equal(found[:, :-rope_dims], expected[:, :-rope_dims])
    assert torch.equal(found[:, -rope_dims:], x[:, -rope_dims:].bfloat16().float())


# --- Hadamard


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_equals_the_matrix_of_signs(width):
    x = torch.from_numpy(np.random.default_rng(width).standard_normal((3, width))).float()
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    expected = x.double().numpy() @ signs / math.sqrt(width)
    assert np.abs(hadamard(x).numpy() - expected).max() < 1e-6 * math.sqrt(width)


def test_hadamard_is_its_own_inverse_and_keeps_dot_products():
    a, b = (torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 128))).float() for seed in (0, 1))
    assert torch.allclose(hadamard(hadamard(a)), a, atol=1e-6)
    assert torch.allclose(hadamard(a) @ hadamard(b).T, a @ b.T, atol=1e-4)
