"""Number formats: every byte against hand-made statements of it, and rounding against exact fractions."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from deepspan.ops.formats import (
    Packed,
    decode_e2m1,
    decode_fp4,
    decode_fp8,
    encode_e2m1,
    encode_fp8,
    fp4_scale,
    fp8_scale,
    pack_nibbles,
    power_of_two_above,
    unpack_int4,
)

NIBBLES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BYTES = torch.arange(256, dtype=torch.uint8)


def e4m3(code: int) -> float:
    """From the layout: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, all ones are NaN."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return math.copysign(size, sign)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


def same(found: list[float], expected: list[float]) -> bool:
    """Equal in value, sign of zero and place of NaN."""
    return all(
        (math.isnan(f) and math.isnan(e)) or (f == e and math.copysign(1, f) == math.copysign(1, e))
        for f, e in zip(found, expected, strict=True)
    )


def one_block(values: torch.Tensor, scale_code: int = 127) -> Packed:
    return Packed(values, torch.tensor([[scale_code]], dtype=torch.uint8).view(torch.float8_e8m0fnu))


# --- decoding every byte


def test_decode_fp8_of_every_byte_equals_its_layout():
    found = decode_fp8(one_block(BYTES.view(torch.float8_e4m3fn)[:128, None])).flatten().tolist()
    found += decode_fp8(one_block(BYTES.view(torch.float8_e4m3fn)[128:, None])).flatten().tolist()
    assert same(found, [e4m3(code) for code in range(256)])
    assert max(value for value in found if not math.isnan(value)) == 448.0
    assert sum(math.isnan(value) for value in found) == 2


def test_decode_fp8_of_every_scale_byte_equals_its_power_of_two():
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    found = [float(decode_fp8(one_block(one, code))) for code in range(256)]
    assert same(found, [e8m0(code) for code in range(256)])
    assert found[0] == 2.0**-127
    assert math.isnan(found[255])


def test_decode_fp4_of_every_scale_byte_equals_its_power_of_two():
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)
    found = [decode_fp4(one_block(codes, code)).flatten().tolist() for code in range(256)]
    assert all(same(row, [e8m0(code)] * 32) for code, row in enumerate(found))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_decode_e2m1_of_every_byte_gives_low_nibble_first(dtype):
    found = decode_e2m1(BYTES.view(dtype)).tolist()
    expected = [value for code in range(256) for value in (NIBBLES[code & 15], NIBBLES[code >> 4])]
    assert same(found, expected)


def test_unpack_int4_of_every_byte_gives_signed_low_nibble_in_the_first_row():
    found = unpack_int4(BYTES.view(torch.int8)[None])
    signed = [code - 16 if code > 7 else code for code in range(16)]
    assert found.dtype == torch.int8
    assert found.tolist() == [[signed[code & 15] for code in range(256)], [signed[code >> 4] for code in range(256)]]


# --- decoding with scales


def random_fp8(rows: int, columns: int, scale_dtype: torch.dtype) -> Packed:
    rng = np.random.default_rng(rows * columns)
    values = torch.from_numpy(rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)) | torch.from_numpy(
        rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
    )
    blocks = (-(-rows // 128), -(-columns // 128))
    if scale_dtype == torch.float32:
        return Packed(values.view(torch.float8_e4m3fn), torch.from_numpy(rng.random(blocks, dtype=np.float32) + 0.5))
    codes = torch.from_numpy(rng.integers(110, 140, blocks, dtype=np.uint8))
    return Packed(values.view(torch.float8_e4m3fn), codes.view(torch.float8_e8m0fnu))


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (130, 200), (1, 1), (257, 127)])
def test_decode_fp8_multiplies_each_block_by_its_scale(rows, columns, scale_dtype):
    packed = random_fp8(rows, columns, scale_dtype)
    found, codes, scale = decode_fp8(packed), packed.values.view(torch.uint8), packed.scale.float()
    expected = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            expected[n, k] = np.float32(e4m3(int(codes[n, k]))) * np.float32(scale[n // 128, k // 128])
    assert np.array_equal(found.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize(("first", "last"), [(0, 1), (127, 129), (128, 256), (100, 300), (299, 300)])
def test_decode_fp8_of_some_rows_equals_those_of_all(first, last):
    packed = random_fp8(300, 140, torch.float8_e8m0fnu)
    assert torch.equal(decode_fp8(packed, first, last), decode_fp8(packed)[first:last])


def test_decode_fp4_multiplies_each_group_of_32_by_its_scale():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (5, 48), dtype=np.uint8)
    scales = rng.integers(100, 150, (5, 3), dtype=np.uint8)
    packed = Packed(torch.from_numpy(pairs).view(torch.int8), torch.from_numpy(scales).view(torch.float8_e8m0fnu))
    found = decode_fp4(packed)
    for n in range(5):
        for k in range(96):
            nibble = pairs[n, k // 2] >> 4 if k % 2 else pairs[n, k // 2] & 15
            assert float(found[n, k]) == NIBBLES[nibble] * 2.0 ** (int(scales[n, k // 32]) - 127)


def test_decoded_blocks_with_power_of_two_scales_are_exact_in_bf16():
    found = decode_fp8(random_fp8(256, 256, torch.float8_e8m0fnu))
    assert torch.equal(found.bfloat16().float(), found)


# --- rounding


@pytest.mark.parametrize("exponent", [-126, -20, -1, 0, 1, 9, 126])
def test_power_of_two_above_is_exact_at_powers_and_beside_them(exponent):
    power = torch.tensor(2.0**exponent)
    assert float(power_of_two_above(power)) == 2.0**exponent
    assert float(power_of_two_above(torch.nextafter(power, torch.tensor(torch.inf)))) == 2.0 ** (exponent + 1)
    if exponent > -126:
        assert float(power_of_two_above(torch.nextafter(power, torch.tensor(0.0)))) == 2.0**exponent


def nearest(value: Fraction, grid: list[tuple[Fraction, int]]) -> int:
    """Code of the nearest number of a grid; of two equally near ones the even code."""
    return min(grid, key=lambda pair: (abs(pair[0] - value), pair[1] % 2))[1]


def in_and_between(grid: list[float]) -> list[float]:
    """All numbers of a grid of magnitudes; between neighbours the middle, and the fp32 numbers on both sides of it."""
    middles = [(low + high) / 2 for low, high in pairwise(grid)]
    beside = [float(np.nextafter(np.float32(m), np.float32(side))) for m in middles for side in (-np.inf, np.inf)]
    return [*grid, *middles, *beside]


def test_encode_fp8_takes_the_nearest_and_the_even_code_on_ties():
    grid = [e4m3(code) for code in range(0x7F)]
    values = in_and_between(grid)
    found = encode_fp8(torch.tensor(values)).view(torch.uint8).tolist()
    codes = [(Fraction(value), code) for code, value in enumerate(grid)]
    assert found == [nearest(Fraction(value), codes) for value in values]
    negative = encode_fp8(-torch.tensor(values)).view(torch.uint8).tolist()
    assert negative == [code | 0x80 for code in found]


def test_encode_fp8_limits_what_is_too_large_and_keeps_nan():
    found = encode_fp8(torch.tensor([448.0, 449.0, 1e30, torch.inf, -470.0, -torch.inf, torch.nan])).float().tolist()
    assert found[:6] == [448.0] * 4 + [-448.0] * 2
    assert math.isnan(found[6])


def test_encode_e2m1_takes_the_nearest_and_the_even_code_on_ties():
    values = in_and_between(NIBBLES[:8])
    found = encode_e2m1(torch.tensor(values)).tolist()
    codes = [(Fraction(value), code) for code, value in enumerate(NIBBLES[:8])]
    assert found == [nearest(Fraction(value), codes) for value in values]
    assert encode_e2m1(-torch.tensor(values)).tolist() == [code | 8 for code in found]


def test_encode_e2m1_of_named_ties():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 1e9])
    assert decode_e2m1(encode_e2m1(ties)).tolist()[::2] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]


def test_pack_nibbles_is_undone_by_decoding():
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 1)
    codes = torch.stack((codes, codes.T), dim=-1).reshape(1, -1)
    assert same(decode_e2m1(pack_nibbles(codes)).flatten().tolist(), [NIBBLES[code] for code in codes.flatten()])


@pytest.mark.parametrize(("scale_of", "largest"), [(fp8_scale, 448.0), (fp4_scale, 6.0)])
@pytest.mark.parametrize("exponent", [-10, 0, 5])
def test_scale_brings_the_largest_into_the_format_and_no_further(scale_of, largest, exponent):
    top = torch.tensor(largest * 2.0**exponent)
    assert float(scale_of(top)) == 2.0**exponent
    assert float(scale_of(torch.nextafter(top, torch.tensor(torch.inf)))) == 2.0 ** (exponent + 1)
    assert float(scale_of(top / 2)) == 2.0 ** (exponent - 1)


def test_scale_of_nothing_is_the_smallest():
    assert float(fp8_scale(torch.tensor(0.0))) == 2.0**-22  # 1e-4 / 448 lies between 2^-23 and 2^-22
    assert float(fp8_scale(torch.tensor(1e-4))) == 2.0**-22
    assert float(fp4_scale(torch.tensor(0.0))) == 2.0**-126
