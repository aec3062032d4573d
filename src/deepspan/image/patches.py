"""From RGB pixels and a resize plan to the patches that the vision encoder reads.

Owns resampling, the grey of the letterbox, normalisation and the order inside a patch. Invariants of the release:
Pillow bicubic (antialiased) on 8-bit channels; values (v / 255 - 0.5) / 0.5 in float32, rounded to bfloat16 before the
encoder.
Called by `image.prepare`.
"""

import numpy as np
from PIL import Image

from deepspan.image.resize import ResizePlan

LETTERBOX_GREY = 127
NUM_CHANNELS = 3


def image_patches(pixels: np.ndarray, plan: ResizePlan) -> np.ndarray:
    """Patches of one image.

    pixels: uint8 [H, W, 3], the image that `plan` was made for.
    Returns float32 [grid_rows * grid_cols, 3 * patch * patch], values exact in bfloat16: patches row by row, in a patch
    channel first (index channel * patch * patch + y * patch + x).
    """
    patch = plan.patch_size
    tiles = draw_canvas(pixels, plan).reshape(plan.grid_rows, patch, plan.grid_cols, patch, NUM_CHANNELS)
    tiles = tiles.transpose(0, 2, 4, 1, 3).reshape(plan.grid_rows * plan.grid_cols, NUM_CHANNELS * patch * patch)
    return PIXEL_VALUES[tiles]


def draw_canvas(pixels: np.ndarray, plan: ResizePlan) -> np.ndarray:
    """The picture resized and centred on grey: uint8 [canvas_height, canvas_width, 3]."""
    canvas = np.full((plan.canvas_height, plan.canvas_width, NUM_CHANNELS), LETTERBOX_GREY, dtype=np.uint8)
    size = plan.content_width, plan.content_height
    if min(size) > 0:
        content = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        top, left = plan.content_top, plan.content_left
        canvas[top : top + plan.content_height, left : left + plan.content_width] = np.asarray(content)
    return canvas


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 values to the nearest bfloat16, ties to even; the result stays float32, any shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _pixel_values() -> np.ndarray:
    unit = np.arange(256, dtype=np.float32) / np.float32(255)
    return round_to_bfloat16((unit - np.float32(0.5)) / np.float32(0.5))


PIXEL_VALUES = _pixel_values()  # float32 [256]: an 8-bit level to its normalised value, so that a gather does it all
