"""Patches: order, normalisation and bfloat16 rounding by hand; pixel hashes of the release."""

import hashlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from released import RELEASED_VISION, TINY_VISION

from deepspan.image.patches import PIXEL_VALUES, draw_canvas, image_patches, round_to_bfloat16
from deepspan.image.prepare import prepare_image
from deepspan.image.resize import plan_resize

HASHES = [  # first 16 hex digits of SHA-256 over the patches as little-endian float32
    ((224, 224), "1ec9d646a70e494d"),
    ((640, 480), "23899804cbb8feac"),
    ((1920, 1080), "84da1d1a02c91a6a"),
    ((100, 2000), "dce8ece5fd040fe6"),
    ((4000, 100), "2ba27321e8ed0a1d"),
    ((8000, 1000), "edcc2cce0206926e"),
    ((320, 400), "692d3308f63c690c"),
    ((1024, 701), "ca17102a7fc539f4"),
    ((450, 308), "e8e8bd6f50f3431a"),
    ((14, 14), "e2accdb3a939db6a"),
    ((1, 1), "89eab249b03327c6"),
]


def synthetic(width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: R = 7x + 3y, G = 5x + 11y, B = x + 13y (mod 256)."""
    y, x = (axis.astype(np.uint8) for axis in np.ogrid[:height, :width])  # uint8 wraps as wanted
    return np.stack((7 * x + 3 * y, 5 * x + 11 * y, x + 13 * y), axis=-1)


@pytest.mark.parametrize("mode", ["reference", "serving"])
@pytest.mark.parametrize(("size", "expected"), HASHES)
def test_patches_of_synthetic_image_equal_release(size, expected, mode):
    image = prepare_image(Image.fromarray(synthetic(*size)), RELEASED_VISION, mode=mode)
    assert image.patches.dtype == np.float32
    assert image.patches.shape == (image.grid_rows * image.grid_cols, 3 * 14 * 14)
    assert hashlib.sha256(image.patches.astype("<f4").tobytes()).hexdigest()[:16] == expected


@pytest.mark.parametrize(
    ("level", "value"),
    [(0, -1.0), (1, -0.9921875), (127, -0.003936767578125), (128, 0.003936767578125), (255, 1.0)],
)
def test_pixel_value_of_level_equals_release(level, value):
    assert PIXEL_VALUES[level] == np.float32(value)


def test_patches_of_numbered_canvas_are_channel_first_in_raster_order():
    pixels = synthetic(12, 18)
    plan = plan_resize(12, 18, TINY_VISION)
    assert (plan.canvas_width, plan.canvas_height) == (12, 18)
    patches = image_patches(pixels, plan)
    assert patches.shape == (54, 12)
    for row, col in ((0, 0), (0, 5), (1, 0), (8, 5), (4, 3)):
        tile = pixels[2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
        by_hand = [PIXEL_VALUES[tile[y, x, c]] for c in range(3) for y in range(2) for x in range(2)]
        assert patches[row * 6 + col].tolist() == by_hand


@pytest.mark.parametrize("size", [(320, 400), (640, 480), (450, 308), (333, 90), (90, 333)])
def test_canvas_of_letterboxed_image_equals_pillow_pad(size):
    pixels = synthetic(*size)
    plan = plan_resize(*size, RELEASED_VISION)
    canvas = draw_canvas(pixels, plan)
    expected = ImageOps.pad(
        Image.fromarray(pixels), (plan.canvas_width, plan.canvas_height), Image.Resampling.BICUBIC, (127, 127, 127)
    )
    assert np.array_equal(canvas, np.asarray(expected))


def test_canvas_of_needle_is_a_line_in_serving_and_grey_in_reference():
    pixels = np.full((400, 1, 3), 255, dtype=np.uint8)
    line = draw_canvas(pixels, plan_resize(1, 400, TINY_VISION))
    grey = draw_canvas(pixels, plan_resize(1, 400, TINY_VISION, min_content=0))
    assert (grey == 127).all()
    assert (line == 255).all(axis=(0, 2)).sum() == 1


def test_bfloat16_rounding_at_ties_goes_to_even():
    ulp = 2.0**-7  # spacing of bfloat16 in [1, 2)
    values = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-20, -(1 + ulp / 2), 0.0, -1.0], dtype=np.float32)
    expected = np.array([1, 1 + 2 * ulp, 1 + ulp, -1, 0, -1], dtype=np.float32)
    assert round_to_bfloat16(values).tolist() == expected.tolist()


def test_bfloat16_rounding_of_rounded_values_changes_nothing():
    assert np.array_equal(round_to_bfloat16(PIXEL_VALUES), PIXEL_VALUES)
