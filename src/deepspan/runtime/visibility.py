"""Which positions a row may see, as intervals on the host (numpy, no torch).

One rule for all layers' raw rows: a row outside image spans sees the last `window` positions and itself; a row inside a
span sees that window united with the whole span, which is again one interval. Compressed entries stay causal, for image
rows too. Used by `runtime.batch_builder`.
"""

from collections.abc import Sequence

import numpy as np

from deepspan.core.media import ImageSpan


def visible_intervals(num_tokens: int, window: int, spans: Sequence[ImageSpan]) -> tuple[np.ndarray, np.ndarray]:
    """(lo, hi), int64 [num_tokens] each, both ends included.

    Lead pads are outside their span. Spans are ascending and disjoint, and end inside `num_tokens`.
    """
    positions = np.arange(num_tokens, dtype=np.int64)
    lo, hi = np.maximum(positions - window + 1, 0), positions.copy()
    for span in spans:
        assert span.last < num_tokens, "a span must be materialised whole before its rows are computed"
        inside = slice(span.first, span.last + 1)
        lo[inside] = np.minimum(lo[inside], span.first)
        hi[inside] = span.last
    return lo, hi


def num_visible_entries(num_tokens: int, ratio: int) -> np.ndarray:
    """int64 [num_tokens]: entries whose group ends at or before the position, `(p + 1) // ratio`."""
    return np.arange(1, num_tokens + 1, dtype=np.int64) // ratio
