"""Which positions a row may see, as intervals on the host (numpy, no torch).

One rule for all layers' raw rows: a row outside image spans sees the last `window` positions and itself; a row inside a
span sees that window united with the whole span, which is again one interval. Compressed entries stay causal, for image
rows too. Used by the batch builders.
"""

from collections.abc import Sequence

import numpy as np

from deepspan.core.media import ImageSpan
from deepspan.errors import InputError


def check_chunk(start: int, end: int, spans: Sequence[ImageSpan], longest: int) -> None:
    """Refuse a chunk [start, end) that cuts an image on either side, or a span that cannot be one.

    longest: tokens of a span at most. The right cut is what a small budget makes, the left one what a bad prefix hit
    makes; both would be answered fluently from half a picture. Raises InputError naming the span.
    """
    for span in spans:
        where = f"image span [{span.first}, {span.last}]"
        if span.last < span.first:
            raise InputError(f"{where} is invalid: it ends before it begins")
        if span.last - span.first + 1 > longest:
            raise InputError(f"{where} exceeds vision_max_n_token {longest}")
        if span.first < end and span.last >= start and not (start <= span.first and span.last < end):
            raise InputError(f"{where} must lie in a single prefill chunk, found [{start}, {end})")


def visible_intervals(start: int, end: int, window: int, spans: Sequence[ImageSpan]) -> tuple[np.ndarray, np.ndarray]:
    """(lo, hi) of positions [start, end): int64 [end - start] each, both ends included.

    Lead pads are outside their span. Spans are ascending and disjoint; those that touch the range lie inside it.
    """
    positions = np.arange(start, end, dtype=np.int64)
    lo, hi = np.maximum(positions - window + 1, 0), positions.copy()
    for span in spans:
        if span.last < start or span.first >= end:
            continue
        whole = start <= span.first and span.last < end
        assert whole, "a span must be materialised whole before its rows are computed"
        inside = slice(span.first - start, span.last + 1 - start)
        lo[inside] = np.minimum(lo[inside], span.first)
        hi[inside] = span.last
    return lo, hi


def num_visible_entries(start: int, end: int, ratio: int) -> np.ndarray:
    """int64 [end - start]: entries whose group ends at or before the position, `(p + 1) // ratio`."""
    return np.arange(start + 1, end + 1, dtype=np.int64) // ratio
