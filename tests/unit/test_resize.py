"""The resize plan against the worked sizes of the release, and its invariants over sizes and configurations."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from released import RELEASED_VISION, TINY_VISION

from deepspan.errors import ConfigError, ImageError
from deepspan.image.layout import block_length, num_lead_pads
from deepspan.image.resize import plan_resize, worst_case_grid

FULL, STRETCH, LETTERBOX = "full", "stretch", "letterbox"
WORKED = [  # sizes; canvas w x h; encoder rows x cols; token rows x cols; block length at position 0 (mod 4); fit
    ([(1, 1), (14, 14), (50, 50), (64, 64), (224, 224), (384, 384)], (392, 392), (28, 28), (10, 10), 117, FULL),
    ([(200, 150)], (448, 336), (24, 32), (8, 11), 101, FULL),
    ([(320, 400)], (350, 434), (31, 25), (11, 9), 125, (347, 434, 2, 0)),
    ([(450, 308)], (476, 322), (23, 34), (8, 12), 109, (470, 322, 3, 0)),
    ([(512, 512)], (518, 518), (37, 37), (13, 13), 201, FULL),
    ([(640, 480)], (644, 490), (35, 46), (12, 16), 209, (644, 483, 0, 4)),
    ([(480, 640)], (490, 644), (46, 35), (16, 12), 213, (483, 644, 4, 0)),
    ([(800, 600)], (812, 602), (43, 58), (15, 20), 341, LETTERBOX),
    ([(768, 768)], (756, 756), (54, 54), (18, 18), 349, FULL),
    ([(1024, 701)], (854, 588), (42, 61), (14, 21), 313, (854, 585, 0, 2)),
    ([(1024, 768), (4000, 3000)], (882, 658), (47, 63), (16, 21), 357, LETTERBOX),
    ([(1920, 1080), (3840, 2160), (1280, 720)], (1036, 588), (42, 74), (14, 25), 369, (1036, 583, 0, 2)),
    ([(1080, 1920)], (560, 1008), (72, 40), (24, 14), 365, LETTERBOX),
    ([(100, 2000)], (112, 2002), (143, 8), (48, 3), 197, (100, 2002, 6, 0)),
    ([(100, 4200)], (84, 3528), (252, 6), (84, 2), 257, FULL),
    ([(1000, 8000)], (252, 2016), (144, 18), (48, 6), 341, FULL),
    ([(10, 10000), (1, 100000)], (42, 7896), (564, 3), (188, 1), 381, LETTERBOX),
    (
        [(2000, 100), (4000, 100), (4200, 100), (10000, 10), (800, 100)],
        (1092, 140),
        (10, 78),
        (4, 26),
        113,
        STRETCH,
    ),
    ([(8000, 1000), (8001, 1000)], (2016, 252), (18, 144), (6, 48), 301, STRETCH),
    ([(7999, 1000)], (2002, 252), (18, 143), (6, 48), 301, LETTERBOX),
    ([(128, 96)], (448, 336), (24, 32), (8, 11), 101, FULL),
    ([(560, 266)], (560, 266), (19, 40), (7, 14), 125, FULL),
    ([(1930, 329)], (1932, 336), (24, 138), (8, 46), 381, LETTERBOX),
]
CASES = [(size, *row[1:]) for row in WORKED for size in row[0]]


@pytest.mark.parametrize(("size", "canvas", "grid", "cells", "length", "fit"), CASES)
def test_plan_of_worked_size_equals_release(size, canvas, grid, cells, length, fit):
    plan = plan_resize(*size, RELEASED_VISION)
    assert (plan.canvas_width, plan.canvas_height) == canvas
    assert (plan.grid_rows, plan.grid_cols) == grid
    assert (plan.num_rows, plan.num_cols) == cells
    lengths = [block_length(*cells) + num_lead_pads(position) for position in range(4)]
    assert lengths == [length, length - 1, length - 2, length - 3]

    content = plan.content_width, plan.content_height, plan.content_left, plan.content_top
    assert plan.stretched == (fit == STRETCH)
    if fit == LETTERBOX:
        assert content[:2] != canvas
    else:
        assert content == ((*canvas, 0, 0) if fit in (FULL, STRETCH) else fit)


@pytest.mark.parametrize(
    ("vision", "grid"),
    [
        (RELEASED_VISION, (8, 46)),
        (TINY_VISION, (4, 13)),
        (replace(TINY_VISION, max_n_token=9), (2, 1)),
        (replace(RELEASED_VISION, patch_size=2), (8, 46)),
    ],
)
def test_worst_case_grid_of_configuration_has_most_rows(vision, grid):
    assert worst_case_grid(vision) == grid


def test_worst_case_grid_of_release_is_above_the_square_one():
    assert block_length(8, 46) == 378
    assert block_length(18, 18) == 346


def test_worst_case_grid_without_room_for_a_cell_is_refused():
    with pytest.raises(ConfigError, match=r"vision_max_n_token 8 .* 6 tokens .* 3 lead pads"):
        worst_case_grid(replace(RELEASED_VISION, max_n_token=8))


def check_invariants(width, height, vision):
    plan = plan_resize(width, height, vision)
    assert plan == plan_resize(width, height, vision)
    assert all(type(value) in (int, bool) for value in astuple(plan))
    length = block_length(plan.num_rows, plan.num_cols)
    assert length <= vision.max_n_token - 3
    assert length % 4 == 2
    worst_rows, worst_cols = worst_case_grid(vision)
    assert plan.num_rows * plan.num_cols <= worst_rows * worst_cols
    assert plan.canvas_width == plan.grid_cols * vision.patch_size
    assert plan.canvas_height == plan.grid_rows * vision.patch_size
    ratio = vision.downsample_ratio
    assert (plan.num_rows, plan.num_cols) == (-(-plan.grid_rows // ratio), -(-plan.grid_cols // ratio))
    assert 1 <= plan.content_width <= plan.content_left + plan.content_width <= plan.canvas_width
    assert 1 <= plan.content_height <= plan.content_top + plan.content_height <= plan.canvas_height
    assert plan.canvas_width == plan.content_width or plan.canvas_height == plan.content_height


@given(st.integers(1, 8000), st.integers(1, 8000))
def test_plan_of_any_size_keeps_invariants(width, height):
    check_invariants(width, height, RELEASED_VISION)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 3, 8]), st.sampled_from([32, 64, 100]))
def test_plan_of_tiny_configuration_keeps_invariants(width, height, max_wh_ratio, max_n_token):
    check_invariants(width, height, replace(TINY_VISION, max_wh_ratio=max_wh_ratio, max_n_token=max_n_token))


@given(st.integers(1, 8000), st.integers(1, 20))
def test_plan_of_slivers_keeps_invariants(length, breadth):
    check_invariants(length, breadth, RELEASED_VISION)
    check_invariants(breadth, length, RELEASED_VISION)


@pytest.mark.parametrize(("slack_height", "top"), [(583, 2), (585, 2), (483, 4)])
def test_plan_offset_of_odd_slack_is_rounded_half_to_even(slack_height, top):
    sizes = {583: (1920, 1080), 585: (1024, 701), 483: (640, 480)}
    plan = plan_resize(*sizes[slack_height], RELEASED_VISION)
    assert (plan.content_height, plan.content_top) == (slack_height, top)


def test_plan_of_needle_keeps_one_pixel_unless_release_grey_is_asked_for():
    serving, reference = (plan_resize(1, 100_000, RELEASED_VISION, min_content=n) for n in (1, 0))
    assert (serving.content_width, serving.content_left, serving.content_height) == (1, 20, 7896)
    assert (reference.content_width, reference.content_left) == (0, 21)
    assert (serving.grid_rows, serving.grid_cols) == (reference.grid_rows, reference.grid_cols)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (-1, 3)])
def test_plan_of_empty_image_is_refused(size):
    with pytest.raises(ImageError, match="at least one pixel"):
        plan_resize(*size, RELEASED_VISION)


@pytest.mark.parametrize(("size", "max_n_token"), [((100, 100), 3), ((100, 100), 8), ((1, 5000), 7), ((5000, 1), 10)])
def test_plan_under_impossible_budget_is_refused_with_the_numbers(size, max_n_token):
    with pytest.raises(ImageError, match=f"vision_max_n_token {max_n_token} .*patch size 14"):
        plan_resize(*size, replace(RELEASED_VISION, max_n_token=max_n_token))
