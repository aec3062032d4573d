"""Vision operations: two-axis rotary tables, attention inside images, unfolding into tiles."""

import math

import numpy as np
import pytest
import torch

from deepspan.ops.vision import apply_vision_rope, unfold_tiles, vision_attention, vision_rope_table


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


# --- rotary embedding -------------------------------------------------------------------------------------------


def test_vision_rope_table_of_golden_patch_has_row_block_then_column_block():
    """3 x 4 grid, patch 7 is row 1, column 3."""
    cos, sin = vision_rope_table(3, 4, 64, 10000.0)
    assert cos.shape == sin.shape == (12, 32)
    found = [float(x) for x in (cos[7, 0], cos[7, 16], sin[7, 0], sin[7, 16])]
    assert found == pytest.approx([0.540302, -0.989992, 0.841471, 0.141120], abs=1e-6)


def test_vision_rope_table_equals_angles_written_out():
    cos, sin = vision_rope_table(5, 3, 32, 10000.0)
    for row in range(5):
        for col in range(3):
            angles = [at * 10000.0 ** (-2 * j / 16) for at in (row, col) for j in range(8)]
            assert cos[3 * row + col].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-6)
            assert sin[3 * row + col].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-6)


def test_apply_vision_rope_pairs_halves():
    """cos 0, sin 1: (low, high) -> (-high, low), pair (d, d + K/2); neighbours are not paired."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert apply_vision_rope(x, torch.zeros(1, 2), torch.ones(1, 2)).tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


def test_apply_vision_rope_products_depend_on_row_and_column_distance_only():
    query, key = normal(1, 1, 16), normal(1, 1, 16, seed=1)
    cos, sin = vision_rope_table(8, 8, 16, 10000.0)

    def product(query_at: tuple[int, int], key_at: tuple[int, int]) -> float:
        q, k = ((8 * row + col) for row, col in (query_at, key_at))
        turned = [apply_vision_rope(x, cos[i : i + 1], sin[i : i + 1]) for x, i in ((query, q), (key, k))]
        return float((turned[0] * turned[1]).sum())

    assert product((5, 6), (3, 2)) == pytest.approx(product((2, 4), (0, 0)), abs=1e-5)
    assert product((5, 6), (3, 2)) != pytest.approx(product((6, 5), (3, 2)), abs=1e-3)


def test_apply_vision_rope_of_bfloat16_rotates_in_fp32():
    x = normal(12, 2, 16).bfloat16()
    cos, sin = vision_rope_table(3, 4, 16, 10000.0)
    assert torch.equal(apply_vision_rope(x, cos, sin), apply_vision_rope(x.float(), cos, sin).bfloat16())


# --- attention --------------------------------------------------------------------------------------------------


def test_vision_attention_equals_naive_softmax_inside_each_image():
    lengths = [5, 1, 9]
    q, k, v = (normal(15, 2, 8, seed=seed) for seed in range(3))
    found = vision_attention(q, k, v, lengths).numpy()
    start = 0
    for length in lengths:
        image = range(start, start + length)
        for i in image:
            for head in range(2):
                weights = [math.exp(float(q[i, head].double() @ k[j, head].double()) / math.sqrt(8)) for j in image]
                expected = sum(w * v[j, head].double() for w, j in zip(weights, image, strict=True)) / sum(weights)
                assert np.abs(found[i, head] - expected.numpy()).max() < 2e-6
        start += length


# --- tiles ------------------------------------------------------------------------------------------------------


def test_unfold_tiles_of_golden_grid_is_channel_major_and_zero_padded():
    """4 x 5 grid, 2 channels, value (5 row + column) 2 + channel."""
    x = (torch.arange(20)[:, None] * 2 + torch.arange(2)).float()
    tiles = unfold_tiles(x, 4, 5, 3)
    assert tiles.shape == (4, 18)
    assert tiles[0].tolist() == [0, 2, 4, 10, 12, 14, 20, 22, 24, 1, 3, 5, 11, 13, 15, 21, 23, 25]
    assert tiles[-1].tolist() == [36, 38, *[0] * 7, 37, 39, *[0] * 7]


@pytest.mark.parametrize("grid", [(3, 3), (6, 3), (4, 5), (1, 1), (7, 2)])
def test_unfold_tiles_of_any_grid_equals_naive_loops(grid):
    rows, cols = grid
    x = normal(rows * cols, 2)
    tiles = unfold_tiles(x, rows, cols, 3)
    tile_cols = -(-cols // 3)
    assert len(tiles) == -(-rows // 3) * tile_cols
    for index, channel, dy, dx in np.ndindex(len(tiles), 2, 3, 3):
        row, col = 3 * (index // tile_cols) + dy, 3 * (index % tile_cols) + dx
        expected = float(x[row * cols + col, channel]) if row < rows and col < cols else 0.0
        assert float(tiles[index, 9 * channel + 3 * dy + dx]) == expected
