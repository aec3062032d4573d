"""Resize plan of one image: from its size in pixels to canvas, encoder grid, token grid and where the picture goes.

Owns the geometry of the release. The plan is a pure function of (width, height, vision configuration): same input, same
integers, on every machine. Invariants: the canvas is a whole number of patches, the picture lies inside the canvas, and
the block with its worst lead pads fits `max_n_token`. One pixel of difference here moves every later token.

Floating point appears where the release uses it, with the same operations in the same order, so that the truncations
agree. Called by `image.prepare`, and by whoever needs token counts or the profiling size before pixels exist.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from deepspan.config.model import VisionConfig
from deepspan.errors import ConfigError, ImageError
from deepspan.image.layout import MAX_LEAD_PADS, block_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """What becomes of one image. Pixels are those of the canvas unless said otherwise.

    canvas_width, canvas_height: size handed to the encoder, multiples of `patch_size`.
    grid_rows, grid_cols: patches of the vision encoder.
    num_rows, num_cols: cells after the aligner merges patches; one IMAGE token each.
    stretched: the picture is resized to the canvas without keeping its aspect ratio; otherwise letterboxed.
    content_*: size of the picture and its upper left corner on the canvas; a side of 0 means that nothing is drawn.
    """

    patch_size: int
    canvas_width: int
    canvas_height: int
    grid_rows: int
    grid_cols: int
    num_rows: int
    num_cols: int
    stretched: bool
    content_width: int
    content_height: int
    content_left: int
    content_top: int


def plan_resize(width: int, height: int, vision: VisionConfig, *, min_content: int = 1) -> ResizePlan:
    """Plan an image of `width` x `height` pixels, as decoded (after any EXIF rotation).

    min_content: shortest side in pixels that the picture may have on the canvas. In the release the width of an extreme
    column (1 x 100000) rounds to 0 and the canvas stays grey: 0 reproduces that, 1 draws a line one pixel wide.

    Raises ImageError naming the sizes if the image is empty or `max_n_token` leaves no room for its shape.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image needs at least one pixel, got {width} x {height}")

    canvas_width, canvas_height = _canvas_size(*_logical_size(width, height, vision), vision)
    stretched = width >= vision.max_wh_ratio * height
    content_width, content_height = canvas_width, canvas_height
    if not stretched:
        content_width, content_height = _contain(width, height, canvas_width, canvas_height)
        content_width, content_height = max(content_width, min_content), max(content_height, min_content)

    num_rows, num_cols = _token_grid(canvas_width, canvas_height, vision)
    return ResizePlan(
        patch_size=vision.patch_size,
        canvas_width=canvas_width,
        canvas_height=canvas_height,
        grid_rows=canvas_height // vision.patch_size,
        grid_cols=canvas_width // vision.patch_size,
        num_rows=num_rows,
        num_cols=num_cols,
        stretched=stretched,
        content_width=content_width,
        content_height=content_height,
        # Half to even, as the release: a slack of 5 leaves 2 on the left, a slack of 7 leaves 4.
        content_left=round(0.5 * (canvas_width - content_width)),
        content_top=round(0.5 * (canvas_height - content_height)),
    )


@lru_cache(maxsize=8)
def worst_case_grid(vision: VisionConfig) -> tuple[int, int]:
    """Token grid (rows, cols) with the most encoder rows that any image can have: 8 x 46 in the release.

    Not square: what newlines, pads and row pairs cost depends on the shape. A grid may be a little wider than
    `max_wh_ratio`, because both sides are cut to whole patches after the clamp.

    Raises ConfigError if `max_n_token` has no room for a single cell.
    """
    budget = _token_budget(vision)
    widest_excess = -(-vision.max_wh_ratio // vision.downsample_ratio)
    best: tuple[int, int] | None = None
    for num_rows in range(1, budget + 1):
        for num_cols in range(1, vision.max_wh_ratio * num_rows + widest_excess + 1):
            if block_length(num_rows, num_cols) > budget:
                break
            if best is None or num_rows * num_cols > best[0] * best[1]:
                best = (num_rows, num_cols)
    if best is None:
        raise ConfigError(
            f"vision_max_n_token {vision.max_n_token} is too small: one cell takes {block_length(1, 1)} tokens "
            f"and up to {MAX_LEAD_PADS} lead pads"
        )
    return best


def _token_budget(vision: VisionConfig) -> int:
    """Tokens of a block without lead pads: where the image will stand is not known yet, so the worst pads are kept."""
    return vision.max_n_token - MAX_LEAD_PADS


def _logical_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Size that the canvas is computed from: wide images clamped (tall ones never), small ones enlarged."""
    width = min(width, vision.max_wh_ratio * height)
    if width * height < vision.min_pixels:
        # A root that every machine rounds alike; against a power of 0.5 no truncated size differs in the release.
        scale = math.sqrt(vision.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    return width, height


def _canvas_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Canvas (width, height) for a logical size: the size rounded up to patches, or shrunk until its block fits."""
    patch, budget = vision.patch_size, _token_budget(vision)
    canvas = patch * -(-width // patch), patch * -(-height // patch)
    # Rounding to patches can overshoot the target by a cell, so the target is lowered until the count itself fits.
    target = budget
    while block_length(*_token_grid(*canvas, vision)) > budget:
        canvas = _shrink(width, height, target, vision)
        target -= 1
    return canvas


def _token_grid(canvas_width: int, canvas_height: int, vision: VisionConfig) -> tuple[int, int]:
    """Cells (rows, cols) of a canvas: the aligner merges `downsample_ratio` squared patches, edges padded."""
    cell = vision.patch_size * vision.downsample_ratio
    return -(-canvas_height // cell), -(-canvas_width // cell)


def _shrink(width: int, height: int, target: int, vision: VisionConfig) -> tuple[int, int]:
    """Canvas (width, height) whose block has about `target` tokens.

    Solves cols * (cols + 1) * aspect = target - 2 (START and END) for real cols, then makes both sides whole: rows
    even, so that no pad row is spent. Very tall images get one column, very wide ones one pair of rows.

    Raises ImageError if the target has no room for the shape.
    """
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    cells = target - 2
    if cells < 1:
        raise _no_room(width, height, vision)
    aspect = height / width
    real_cols = math.sqrt(cells / aspect + 0.25) - 0.5
    real_rows = real_cols * aspect

    if real_cols < 1:
        canvas = cell, cell * _even(cells // 2)
    elif real_rows < 2:
        num_cols = cells // 2 - 1
        canvas = cell * num_cols if num_cols > 1 else 0, cell * 2
    else:
        scale = min(cell * int(real_cols) / width, cell * _even(int(real_rows)) / height)
        canvas = patch * int(width * scale / patch), patch * int(height * scale / patch)
    if min(canvas) == 0:
        raise _no_room(width, height, vision)
    return canvas


def _even(count: int) -> int:
    return count - count % 2


def _no_room(width: int, height: int, vision: VisionConfig) -> ImageError:
    return ImageError(
        f"an image of aspect {width} x {height} does not fit vision_max_n_token {vision.max_n_token} "
        f"(patch size {vision.patch_size}, downsample ratio {vision.downsample_ratio})"
    )


def _contain(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int]:
    """Largest size of the same aspect ratio on the canvas, rounded half to even; a side may round to 0."""
    aspect, canvas_aspect = width / height, canvas_width / canvas_height
    if aspect > canvas_aspect:
        return canvas_width, round(height / width * canvas_width)
    if aspect < canvas_aspect:
        return round(width / height * canvas_height), canvas_height
    return canvas_width, canvas_height
