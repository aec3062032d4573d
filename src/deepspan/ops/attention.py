"""Sparse attention: an interval of raw rows, a set of compressed entries and a sink, in one softmax.

Shapes: T queries, H heads, K head dim, S raw rows, N entries, M selected entries. Rows of all sequences of a batch lie
one after the other; every index here counts in those flat rows, so that sequences need no separate treatment.
One vector per row is both key and value of all heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspan.ops.blocks import QueryBlock


def sparse_attention(
    q_THK: Tensor,
    rows_SK: Tensor,
    row_lo_T: Tensor,
    row_hi_T: Tensor,
    entries_NK: Tensor | None,
    entry_lo_T: Tensor,
    entry_hi_T: Tensor,
    selected_TM: Tensor | None,
    sink_H: Tensor,
    scale: float,
    blocks: Sequence[QueryBlock],
) -> Tensor:
    """Softmax over raw rows [lo, hi], entries [entry_lo, entry_hi) (only the selected ones, if given) and the sink.

    q_THK: rotated queries. row_lo_T, row_hi_T: int64, both ends included. entries_NK: None in layers without
    compression. selected_TM: flat entries inside the row's [entry_lo, entry_hi), -1 for none; None takes all of them.
    sink_H: fp32 logits without a value. blocks cover all queries once, in order. Scores and softmax are fp32.
    Returns [T, H, K] in q's dtype.
    """
    outputs = []
    for block in blocks:
        (q0, q1), (r0, r1), (e0, e1) = block.queries, block.rows, block.entries
        keys = rows_SK[r0:r1]
        mask = _between(torch.arange(r0, r1, device=keys.device), row_lo_T[q0:q1], row_hi_T[q0:q1] + 1)
        if entries_NK is not None and e1 > e0:
            keys = torch.cat((keys, entries_NK[e0:e1]), dim=0)
            ids = torch.arange(e0, e1, device=keys.device)
            visible = _between(ids, entry_lo_T[q0:q1], entry_hi_T[q0:q1])
            if selected_TM is not None:
                visible = visible & _chosen(selected_TM[q0:q1], e0, e1)
            mask = torch.cat((mask, visible), dim=1)
        outputs.append(_attend(q_THK[q0:q1], keys, mask, sink_H, scale))
    return torch.cat(outputs)


def _between(ids: Tensor, lo_T: Tensor, hi_T: Tensor) -> Tensor:
    return (ids >= lo_T[:, None]) & (ids < hi_T[:, None])


def _chosen(selected_TM: Tensor, first: int, last: int) -> Tensor:
    """Indices -> mask [T, last - first]; -1 falls into a spare column that is cut off."""
    width = last - first
    columns = torch.where(selected_TM < 0, width, selected_TM - first)
    mask = torch.zeros(len(selected_TM), width + 1, dtype=torch.bool, device=selected_TM.device)
    return mask.scatter_(1, columns, True)[:, :width]


def _attend(q_THK: Tensor, keys_SK: Tensor, mask_TS: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    num_queries, num_heads, dim = q_THK.shape
    keys = keys_SK.float()
    scores = (q_THK.float().reshape(num_queries * num_heads, dim) @ keys.T).view(num_queries, num_heads, -1) * scale
    scores = scores.masked_fill(~mask_TS[:, None], -torch.inf)
    sink = sink_H.float()[:, None].expand(num_queries, num_heads, 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    out = probs.reshape(num_queries * num_heads, -1) @ keys
    return out.view_as(q_THK).to(q_THK.dtype)
