"""Compressor pooling: one entry for every `ratio` tokens, a softmax-weighted mean per channel.

Shapes: S rows of one sequence from position 0, C row width, d entry width, N = S // ratio entries.
"""

import torch
from torch import Tensor


def compress_groups(kv_SC: Tensor, gate_SC: Tensor, ratio: int, dim: int) -> Tensor:
    """Pool complete groups of `ratio` rows into entries; a last incomplete group yields nothing.

    kv_SC, gate_SC: fp32, gates with the position bias of `position % ratio` already added. C == dim: each entry pools
    its own group. C == 2 dim (overlap): an entry pools the first halves of the previous group's rows and the second
    halves of its own; entry 0 has no previous group and pools its own rows only. Returns fp32 [S // ratio, dim].
    """
    num_entries = kv_SC.shape[0] // ratio
    kv = kv_SC[: num_entries * ratio].unflatten(0, (num_entries, ratio))
    gate = gate_SC[: num_entries * ratio].unflatten(0, (num_entries, ratio))
    if kv_SC.shape[1] == 2 * dim:
        kv = torch.cat((_previous_group(kv[..., :dim], 0.0), kv[..., dim:]), dim=1)
        gate = torch.cat((_previous_group(gate[..., :dim], -torch.inf), gate[..., dim:]), dim=1)
    return (gate.softmax(dim=1) * kv).sum(dim=1)


def _previous_group(rows_Nrd: Tensor, fill: float) -> Tensor:
    """Shift groups by one: group i receives the rows of group i - 1, group 0 receives `fill`."""
    first = torch.full_like(rows_Nrd[:1], fill)
    return torch.cat((first, rows_Nrd[:-1]), dim=0)
