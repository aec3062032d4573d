"""Top-k with one answer: equal values are taken in order of their index.

`torch.topk` leaves ties open, and ties are real here: an index score is exactly 0 when every head's ReLU is off.
"""

from torch import Tensor


def stable_topk(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of each row, largest first, ties by lower index. values: [T, N], k <= N."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
