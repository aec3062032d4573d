"""Image blocks, spans and visible sets, spelled out with Python lists and sets.

Kinds: -1 text, 0 START, 1 PAD, 2 IMAGE, 3 NEWLINE, 4 END. Positions are absolute and start at 0. A span is the
inclusive pair (START position, END position); the leading PADs of a block lie outside its span.
"""

from collections.abc import Sequence

import numpy as np

TEXT, START, PAD, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3, 4


def image_block(height: int, width: int, position: int) -> tuple[list[int], list[int]]:
    """Kinds of the block of a height x width image at `position`, and the raster index of each emitted IMAGE.

    Rows of IMAGE cells each end in a NEWLINE; an odd number of rows gets one more, all PAD. Rows are taken in pairs
    and a pair is emitted column by column, upper cell then lower cell. Two PADs follow if the number of emitted pairs
    of cells is odd. Leading PADs bring START to a position that is 3 modulo 4.
    """
    rows = [[(IMAGE, r * width + c) for c in range(width)] + [(NEWLINE, None)] for r in range(height)]
    if len(rows) % 2 == 1:
        rows.append([(PAD, None)] * (width + 1))
    cells = []
    for upper_row, lower_row in zip(rows[0::2], rows[1::2], strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            cells += [upper, lower]
    num_pairs = len(cells) // 2
    lead = [PAD] * (3 - position % 4)
    trail = [PAD] * (2 if num_pairs % 2 == 1 else 0)
    kinds = [*lead, START, *(kind for kind, _ in cells), *trail, END]
    return kinds, [index for kind, index in cells if kind == IMAGE]


def assemble(parts: Sequence[list[int] | tuple[int, int]]) -> tuple[list[int], list[int]]:
    """(ids, kinds) of a prompt: a list is text ids, a tuple (height, width) is an image block (its rows have id 0)."""
    ids: list[int] = []
    kinds: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            block, _ = image_block(*part, position=len(ids))
            ids += [0] * len(block)
            kinds += block
        else:
            ids += part
            kinds += [TEXT] * len(part)
    return ids, kinds


def find_spans(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Inclusive (START, END) pairs; each START must be closed by an END before the next START or text."""
    spans = []
    opened = None
    for position, kind in enumerate(kinds):
        if kind == START:
            assert opened is None, "START inside a span"
            opened = position
        elif kind == END:
            assert opened is not None, "END without START"
            spans.append((opened, position))
            opened = None
        else:
            assert kind == PAD or (kind == TEXT) == (opened is None), "text inside a span or image cell outside one"
    assert opened is None, "START without END"
    return spans


def raw_visible(query: int, window: int, spans: Sequence[tuple[int, int]]) -> set[int]:
    """Raw positions a query sees: itself and the window-1 before it, and the whole of the span it lies in."""
    visible = set(range(max(0, query - (window - 1)), query + 1))
    for first, last in spans:
        if first <= query <= last:
            visible |= set(range(first, last + 1))
    return visible


def entries_visible(query: int, ratio: int) -> set[int]:
    """Compressed entries a query may see: those of groups whose last token is at or before it, image rows included."""
    return set(range((query + 1) // ratio))


def dense_mask(visible: Sequence[set[int]], num_columns: int) -> np.ndarray:
    """bool [len(visible), num_columns]: True where the column is in the row's set."""
    mask = np.zeros((len(visible), num_columns), dtype=bool)
    for row, columns in enumerate(visible):
        for column in columns:
            mask[row, column] = True
    return mask
