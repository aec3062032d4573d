"""N-layout of one image: which token stands where, and which encoder row fills it.

Owns the only place in deepspan that knows the order of an image's tokens. Pure integers; no tokenizer.
Invariants of the released layout: START sits at position 3 (mod 4), the first cell and END at 0 (mod 4), so that a
ratio-4 compressor group is four consecutive cells, and a block without lead pads has 2 (mod 4) tokens. Everything but
the lead pads is independent of where the image stands, which is why features are cached per image and pads are added
when the block is placed.

Called by `image.prepare` (blocks), `image.resize` (lengths) and the part that expands prompts (placing).
"""

import numpy as np

from deepspan.core.media import ImageBlock, ImageSpan, TokenKind
from deepspan.errors import ImageError

COMPRESS_GROUP = 4  # tokens pooled by the ratio-4 compressor; START must close a group
MAX_LEAD_PADS = COMPRESS_GROUP - 1


def image_block(num_rows: int, num_cols: int) -> ImageBlock:
    """Lay out a grid of `num_rows` x `num_cols` encoder rows.

    Rows are taken in pairs and walked column by column (upper, lower, next column), each row closed by a NEWLINE; an
    odd last row is paired with a row of pads. Two tail pads make the number of cells a multiple of four.

    Raises ImageError if the grid is empty.
    """
    _check_grid(num_rows, num_cols)
    padded_rows = num_rows + num_rows % 2
    kinds = np.full((padded_rows, num_cols + 1), TokenKind.PAD, dtype=np.int8)
    kinds[:num_rows, :num_cols] = TokenKind.IMAGE
    kinds[:num_rows, num_cols] = TokenKind.NEWLINE
    rows = np.full(kinds.shape, -1, dtype=np.int32)
    rows[:num_rows, :num_cols] = np.arange(num_rows * num_cols, dtype=np.int32).reshape(num_rows, num_cols)

    cells, rows = _walk_row_pairs(kinds), _walk_row_pairs(rows)
    tail = [TokenKind.PAD] * (-len(cells) % COMPRESS_GROUP)
    return ImageBlock(
        kinds=np.concatenate(([TokenKind.START], cells, tail, [TokenKind.END])).astype(np.int8),
        encoder_rows=rows[rows >= 0],
    )


def block_length(num_rows: int, num_cols: int) -> int:
    """Tokens of `image_block(num_rows, num_cols)`, lead pads not counted; always 2 (mod 4).

    Raises ImageError if the grid is empty.
    """
    _check_grid(num_rows, num_cols)
    cells = (num_rows + num_rows % 2) * (num_cols + 1)
    return 2 + cells + -cells % COMPRESS_GROUP


def num_lead_pads(position: int) -> int:
    """Pads that bring START to 3 (mod 4) when the block is placed at absolute `position`."""
    return MAX_LEAD_PADS - position % COMPRESS_GROUP


def place(block: ImageBlock, position: int) -> ImageSpan:
    """Span of `block` in a prompt whose next free position is `position` (counting everything before it, expanded)."""
    first = position + num_lead_pads(position)
    return ImageSpan(offset=position, first=first, last=first + len(block.kinds) - 1)


def span_of_placeholder(offset: int, length: int) -> ImageSpan:
    """Span of a placeholder known by its first token (a lead pad, or START if there is none) and its `length`.

    One range from START to END: newlines and pads inside never split it.

    Raises ImageError if the placeholder begins before the prompt or ends before its START.
    """
    first, last = offset + num_lead_pads(offset), offset + length - 1
    if offset < 0 or last < first:
        raise ImageError(f"invalid image span: a placeholder of {length} tokens at position {offset} holds no image")
    return ImageSpan(offset=offset, first=first, last=last)


def _check_grid(num_rows: int, num_cols: int) -> None:
    if num_rows < 1 or num_cols < 1:
        raise ImageError(f"an image grid needs at least one cell, got {num_rows} x {num_cols}")


def _walk_row_pairs(grid: np.ndarray) -> np.ndarray:
    """[2k, n] -> [2k * n]: each pair of rows column by column."""
    num_rows, num_cols = grid.shape
    return grid.reshape(num_rows // 2, 2, num_cols).transpose(0, 2, 1).reshape(-1)
