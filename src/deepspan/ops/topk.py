"""Top-k with one answer: equal values are taken in order of their index.

`torch.topk` leaves ties open, and ties are real here: an index score is exactly 0 when every head's ReLU is off.
"""

import torch
from torch import Tensor

SORTED_BELOW = 1024  # shorter rows are sorted whole


def stable_topk(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of each row, largest first, ties by lower index. values: fp32 [T, N], k <= N."""
    if values.shape[1] < SORTED_BELOW:
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # No two keys are equal: the value's bits, put in the order of the numbers, and behind them the index from the end.
    bits = (values.float() + 0.0).contiguous().view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last_first = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return ((order << 32) | last_first).topk(k, dim=1).indices
