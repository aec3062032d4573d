"""The N-layout against the golden blocks of the release and its invariants over every legal grid."""

import numpy as np
import pytest

from deepspan.core.media import ImageSpan, TokenKind
from deepspan.errors import ImageError
from deepspan.image.layout import block_length, image_block, num_lead_pads, place, span_of_placeholder

LETTERS = dict(
    zip("SPINE", (TokenKind.START, TokenKind.PAD, TokenKind.IMAGE, TokenKind.NEWLINE, TokenKind.END), strict=True)
)
PERM_4X5 = [0, 5, 1, 6, 2, 7, 3, 8, 4, 9, 10, 15, 11, 16, 12, 17, 13, 18, 14, 19]
PERM_5X4 = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 17, 18, 19]

GOLDEN = [  # rows, cols, kinds, encoder rows, of the released layout
    (1, 1, "SIPNPE", [0]),
    (1, 2, "SIPIPNPPPE", [0, 1]),
    (2, 1, "SIINNE", [0, 1]),
    (2, 2, "SIIIINNPPE", [0, 2, 1, 3]),
    (2, 3, "SIIIIIINNE", [0, 3, 1, 4, 2, 5]),
    (3, 2, "SIIIINNIPIPNPE", [0, 2, 1, 3, 4, 5]),
    (4, 5, "SIIIIIIIIIINNIIIIIIIIIINNE", PERM_4X5),
    (5, 4, "SIIIIIIIINNIIIIIIIINNIPIPIPIPNPPPE", PERM_5X4),
]
PLACED = [  # rows, cols, position, token codes with lead pads
    (2, 2, 0, [1, 1, 1, 0, 2, 2, 2, 2, 3, 3, 1, 1, 4]),
    (2, 2, 3, [0, 2, 2, 2, 2, 3, 3, 1, 1, 4]),
    (3, 2, 2, [1, 0, 2, 2, 2, 2, 3, 3, 2, 1, 2, 1, 3, 1, 4]),
    (1, 1, 0, [1, 1, 1, 0, 2, 1, 3, 1, 4]),
]
MAX_TOKENS = 384


def all_legal_grids() -> list[tuple[int, int]]:
    return [
        (rows, cols)
        for rows in range(1, MAX_TOKENS)
        for cols in range(1, MAX_TOKENS // rows + 1)
        if block_length(rows, cols) <= MAX_TOKENS
    ]


@pytest.mark.parametrize(("num_rows", "num_cols", "letters", "rows"), GOLDEN)
def test_block_of_golden_grid_equals_release(num_rows, num_cols, letters, rows):
    block = image_block(num_rows, num_cols)
    assert block.kinds.tolist() == [LETTERS[c] for c in letters]
    assert block.encoder_rows.tolist() == rows
    assert block_length(num_rows, num_cols) == len(letters)
    assert (block.kinds.dtype, block.encoder_rows.dtype) == (np.int8, np.int32)


@pytest.mark.parametrize(("num_rows", "num_cols", "position", "codes"), PLACED)
def test_block_with_lead_pads_at_position_equals_release(num_rows, num_cols, position, codes):
    block = image_block(num_rows, num_cols)
    assert [TokenKind.PAD] * num_lead_pads(position) + block.kinds.tolist() == codes


def test_block_of_every_legal_grid_keeps_invariants():
    grids = all_legal_grids()
    assert len(grids) > 1500
    for num_rows, num_cols in grids:
        block = image_block(num_rows, num_cols)
        kinds, case = block.kinds, (num_rows, num_cols)
        assert len(kinds) == block_length(num_rows, num_cols), case
        assert len(kinds) % 4 == 2, case
        assert (kinds[0], kinds[-1]) == (TokenKind.START, TokenKind.END), case
        assert np.bincount(kinds, minlength=5).tolist()[2:] == [num_rows * num_cols, num_rows, 1], case
        assert np.array_equal(np.sort(block.encoder_rows), np.arange(num_rows * num_cols)), case


def test_block_length_of_any_grid_equals_released_formula():
    for num_rows in range(1, 60):
        for num_cols in range(1, 60):
            row = num_cols + 1
            pad_row = row if num_rows % 2 else 0
            tail = 2 * ((num_rows + 1) // 2 * row % 2)
            assert block_length(num_rows, num_cols) == num_rows * row + 2 + pad_row + tail


def test_placed_span_of_every_legal_grid_is_aligned_to_compressor_groups():
    for num_rows, num_cols in all_legal_grids()[::7]:
        block = image_block(num_rows, num_cols)
        for position in (0, 1, 2, 3, 130, 9_999):
            span = place(block, position)
            length = num_lead_pads(position) + len(block.kinds)
            assert span.offset == position
            assert (span.first % 4, span.last % 4) == (3, 0)
            assert 0 <= span.first - span.offset <= 3
            assert span == span_of_placeholder(position, length)


def test_place_directly_after_an_image_takes_two_pads():
    first = place(image_block(2, 2), 6)
    second = place(image_block(2, 3), first.last + 1)
    assert (first.first, first.last) == (7, 16)
    assert (second.offset, second.first, second.last) == (17, 19, 28)


@pytest.mark.parametrize("num_text", [1, 2, 3, 4])
def test_place_of_same_image_after_text_changes_lead_pads_only(num_text):
    block = image_block(7, 14)
    assert len(block.kinds) == 122
    first = place(block, 0)
    second = place(block, first.last + 1 + num_text)
    assert second.first % 4 == 3
    assert second.last - second.offset + 1 == {1: 123, 2: 122, 3: 125, 4: 124}[num_text]


@pytest.mark.parametrize(
    ("offset", "length", "first", "last"), [(5, 12, 7, 16), (8, 13, 11, 20), (3, 10, 3, 12), (2, 15, 3, 16)]
)
def test_span_of_placeholder_is_one_range_from_start_to_end(offset, length, first, last):
    assert span_of_placeholder(offset, length) == ImageSpan(offset=offset, first=first, last=last)


@pytest.mark.parametrize(("offset", "length"), [(0, 3), (4, 0), (-1, 20)])
def test_span_of_impossible_placeholder_is_refused(offset, length):
    with pytest.raises(ImageError, match="invalid image span"):
        span_of_placeholder(offset, length)


@pytest.mark.parametrize("grid", [(0, 3), (3, 0), (-1, 2)])
def test_block_of_empty_grid_is_refused(grid):
    with pytest.raises(ImageError, match="at least one cell"):
        image_block(*grid)
    with pytest.raises(ImageError, match="at least one cell"):
        block_length(*grid)
