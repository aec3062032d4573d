"""RMSNorm and rotary embedding against float64 statements and the laws of rotations."""

import math

import numpy as np
import pytest
import torch

from deepspan.config.model import RopeConfig
from deepspan.ops.norm import rms_norm
from deepspan.ops.rope import apply_rope, rope_frequencies, rope_table

RELEASED = RopeConfig(
    theta=10000.0,
    compress_theta=160000.0,
    factor=16,
    original_max_position_embeddings=65536,
    beta_fast=32,
    beta_slow=1,
)
NUM_DIMS = 64  # rotary dims of the release


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def tables(positions: list[int], num_dims: int = 8, compressed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(rope_frequencies(RELEASED, num_dims, compressed), torch.tensor(positions))


# --- norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 32)])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_rms_norm_equals_float64_statement(shape, has_weight, eps):
    x, weight = normal(*shape), normal(32, seed=1) if has_weight else None
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    if weight is not None:
        expected = expected * weight.double().numpy()
    assert np.abs(rms_norm(x, weight, eps).numpy() - expected).max() < 1e-6


def test_rms_norm_weight_is_plain_and_not_added_to_one():
    assert torch.equal(rms_norm(normal(4, 8), torch.zeros(8), 1e-6), torch.zeros(4, 8))


def test_rms_norm_of_bfloat16_rounds_once_at_the_end():
    x, weight = normal(64, 32).bfloat16(), normal(32, seed=1).bfloat16()
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    half_step = exact.abs() * 2**-8  # a correctly rounded bfloat16 is never farther away
    assert bool(((found.double() - exact).abs() <= half_step * 1.01).all())


@pytest.mark.parametrize("value", [0.0, 1e-12])
def test_rms_norm_of_tiny_rows_is_finite(value):
    assert bool(rms_norm(torch.full((2, 8), value), None, 1e-20).isfinite().all())


# --- frequencies ------------------------------------------------------------------------------------------------


def test_rope_frequencies_of_window_layers_are_plain():
    expected = [10000.0 ** (-2 * i / NUM_DIMS) for i in range(NUM_DIMS // 2)]
    assert rope_frequencies(RELEASED, NUM_DIMS, compressed=False).tolist() == pytest.approx(expected, rel=1e-14)


def test_rope_frequencies_of_compressed_layers_ramp_from_pair_15_to_pair_25():
    found = rope_frequencies(RELEASED, NUM_DIMS, compressed=True)
    plain = [160000.0 ** (-2 * i / NUM_DIMS) for i in range(NUM_DIMS // 2)]
    for i, value in enumerate(found.tolist()):
        ramp = min(max((i - 15) / 10, 0), 1)
        assert value == pytest.approx(plain[i] * (1 - ramp) + plain[i] / 16 * ramp, rel=1e-14)
    assert found[15] == pytest.approx(plain[15], rel=1e-14)
    assert found[16] < plain[16]
    assert found[24] > plain[24] / 16
    assert found[25] == pytest.approx(plain[25] / 16, rel=1e-14)


def test_rope_frequencies_with_empty_ramp_are_finite():
    """Both ends of the ramp on the same pair: a step instead of a division by zero."""
    one_pair = rope_frequencies(RELEASED, 2, compressed=True)
    assert bool(one_pair.isfinite().all())


def test_rope_table_at_last_position_of_release_is_exact_enough():
    position = 1048575
    frequencies = rope_frequencies(RELEASED, NUM_DIMS, compressed=True)
    cos, sin = rope_table(frequencies.float(), torch.tensor([position]))
    assert (cos.dtype, cos.shape) == (torch.float32, (1, NUM_DIMS // 2))
    assert float(cos[0, 0]) == pytest.approx(math.cos(position), abs=1e-5)  # frequency 1: the angle is exact
    assert bool(((cos**2 + sin**2 - 1).abs() < 1e-6).all())


# --- rotation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 32), (6, 3, 32)])
@pytest.mark.parametrize("inverse", [False, True])
def test_apply_rope_equals_complex_multiplication(shape, inverse):
    positions = [0, 1, 5, 127, 128, 4000]
    x = normal(*shape)
    angles = np.outer(positions, rope_frequencies(RELEASED, 8, compressed=False).numpy())
    turn = np.exp(1j * (-angles if inverse else angles)).reshape(6, *([1] * (len(shape) - 2)), 4)
    pairs = x[..., -8:].double().numpy()
    turned = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * turn
    found = apply_rope(x, *tables(positions), inverse=inverse)
    assert torch.equal(found[..., :-8], x[..., :-8])  # only the last dims turn
    assert np.abs(found[..., -8::2].numpy() - turned.real).max() < 1e-3  # fp32 angles at position 4000
    assert np.abs(found[:4, ..., -7::2].numpy() - turned.imag[:4]).max() < 1e-4


def test_apply_rope_at_quarter_turn_pairs_neighbours():
    """cos 0, sin 1: (e, o) -> (-o, e) on neighbouring dims; halves (i, i + R/2) are not paired."""
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]])
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    assert apply_rope(x, zero, one).tolist() == [[9.0, -2.0, 1.0, -4.0, 3.0]]


@pytest.mark.parametrize("compressed", [False, True])
def test_apply_rope_inverse_undoes_it(compressed):
    x = normal(5, 3, 32)
    cos, sin = tables([0, 3, 77, 1000, 100000], compressed=compressed)
    back = apply_rope(apply_rope(x, cos, sin), cos, sin, inverse=True)
    assert float((back - x).abs().max()) < 1e-5


def test_apply_rope_products_depend_on_distance_only():
    query, key = normal(1, 8), normal(1, 8, seed=1)

    def product(query_at: int, key_at: int) -> float:
        return float((apply_rope(query, *tables([query_at])) * apply_rope(key, *tables([key_at]))).sum())

    assert product(17, 5) == pytest.approx(product(212, 200), abs=1e-5)
    assert product(17, 5) != pytest.approx(product(17, 6), abs=1e-3)


def test_apply_rope_of_bfloat16_keeps_dtype_and_rotates_in_fp32():
    x = normal(4, 32).bfloat16()
    cos, sin = tables([1, 2, 3, 4])
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())
