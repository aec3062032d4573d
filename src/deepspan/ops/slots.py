"""Lists of cache slots for kernels that want them instead of intervals: the visible rows of each query, packed left.

Made from the same intervals as everything else, so that a kernel and the reference cannot see different rows. Asks the
device nothing. The compressed lane is apart and stays causal.
"""

import torch
from torch import Tensor


def index_width(window: int, longest_span: int, *, has_spans: bool) -> int:
    """Columns of a list: the window alone, and room for the longest span only where a step has one.

    A row at the start of a span sees the window before it and the whole span: window - 1 + longest_span rows.
    """
    return window + longest_span if has_spans else window


def window_slots(
    row_lo_T: Tensor, row_hi_T: Tensor, tables_TB: Tensor, block_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    """(slots int32 [T, width], lens int32 [T]): slots of the rows [lo, hi] in ascending order, then -1.

    row_lo, row_hi: int64, both ends included, at most `width` rows. tables_TB: block table of each query's sequence.
    A slot is `table[p // block_tokens] * block_tokens + p % block_tokens`.
    """
    positions = row_lo_T[:, None] + torch.arange(width, device=row_lo_T.device)
    lens = row_hi_T - row_lo_T + 1
    inside = positions <= row_hi_T[:, None]
    blocks = tables_TB.gather(1, torch.where(inside, positions // block_tokens, 0))
    slots = torch.where(inside, blocks * block_tokens + positions % block_tokens, -1)
    return slots.int(), lens.int()
