"""Sparse attention: an interval of raw rows, a set of compressed entries and a sink, in one softmax.

Shapes: T queries, H heads, K head dim, S keys of a block, M selected entries. Queries of all sequences lie one after
the other; rows and entries are counted in the sequence of the query. One vector is both key and value of all heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspan.ops.blocks import QueryBlock
from deepspan.ops.rows import Rows

MAX_SCORES = 1 << 25  # held at once: 128 MB
PICK_FACTOR = 4  # with so many times more entries than are chosen, each query reads its own instead of masking all


def sparse_attention(
    q_THK: Tensor,
    rows: Rows,
    row_lo_T: Tensor,
    row_hi_T: Tensor,
    entries: Rows | None,
    entry_hi_T: Tensor,
    selected_TM: Tensor | None,
    sink_H: Tensor,
    scale: float,
    blocks: Sequence[QueryBlock],
) -> Tensor:
    """Softmax over raw rows [lo, hi], entries [0, entry_hi) (only the selected ones, if given) and the sink.

    q_THK: rotated queries. row_lo_T, row_hi_T: int64, both ends included. entries: None in layers without compression.
    selected_TM: entries below the row's entry_hi, -1 for none; None takes all of them. sink_H: fp32 logits without a
    value. blocks cover all queries once, in order. Scores and softmax are fp32. Returns [T, H, K] in q's dtype.
    """
    outputs = []
    for block in blocks:
        (q0, q1), (r0, r1), num_entries = block.queries, block.rows, block.num_entries
        q, keys = q_THK[q0:q1], rows.read(block.sequence, r0, r1)
        mask = _between(torch.arange(r0, r1, device=q.device), row_lo_T[q0:q1], row_hi_T[q0:q1] + 1)
        if entries is None or num_entries == 0:
            outputs += _attend(q, keys, mask, sink_H, scale)
            continue
        chosen = selected_TM[q0:q1] if selected_TM is not None else None
        if chosen is not None and chosen.shape[1] * PICK_FACTOR <= num_entries:
            picked = entries.pick(block.sequence, chosen.clamp(min=0))
            outputs.append(_attend_picked(q, keys, mask, picked, chosen >= 0, sink_H, scale))
            continue
        visible = torch.arange(num_entries, device=q.device) < entry_hi_T[q0:q1, None]
        if chosen is not None:
            visible &= _chosen(chosen, num_entries)
        keys = torch.cat((keys, entries.read(block.sequence, 0, num_entries)))
        outputs += _attend(q, keys, torch.cat((mask, visible), dim=1), sink_H, scale)
    return torch.cat(outputs)


def _between(ids: Tensor, lo_T: Tensor, hi_T: Tensor) -> Tensor:
    return (ids >= lo_T[:, None]) & (ids < hi_T[:, None])


def _chosen(selected_TM: Tensor, width: int) -> Tensor:
    """Entries -> mask [T, width]; -1 falls into a spare column that is cut off."""
    columns = torch.where(selected_TM < 0, width, selected_TM)
    mask = torch.zeros(len(selected_TM), width + 1, dtype=torch.bool, device=selected_TM.device)
    return mask.scatter_(1, columns, True)[:, :width]


def _attend_picked(
    q_THK: Tensor,
    rows_SK: Tensor,
    mask_TS: Tensor,
    picked_TMK: Tensor,
    mask_TM: Tensor,
    sink_H: Tensor,
    scale: float,
) -> Tensor:
    """Shared rows, and entries that each query has picked for itself."""
    num_queries, num_heads, _ = q_THK.shape
    q, rows, picked = q_THK.float(), rows_SK.float(), picked_TMK.float()
    scores = torch.cat((torch.einsum("thk,sk->ths", q, rows), q @ picked.mT), dim=-1) * scale
    scores = scores.masked_fill(~torch.cat((mask_TS, mask_TM), dim=1)[:, None], -torch.inf)
    sink = sink_H.float()[:, None].expand(num_queries, num_heads, 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(-1)
    of_rows, of_picked, _ = probs.split((len(rows), picked.shape[1], 1), dim=-1)
    return (torch.einsum("ths,sk->thk", of_rows, rows) + of_picked @ picked).to(q_THK.dtype)


def _attend(q_THK: Tensor, keys_SK: Tensor, mask_TS: Tensor, sink_H: Tensor, scale: float) -> list[Tensor]:
    """Some queries at a time, so that the scores of a long context stay small."""
    keys_SK = keys_SK.float()
    most = max(1, MAX_SCORES // (q_THK.shape[1] * len(keys_SK)))
    parts = zip(q_THK.split(most), mask_TS.split(most), strict=True)
    return [_attend_part(q, keys_SK, mask, sink_H, scale) for q, mask in parts]


def _attend_part(q_THK: Tensor, keys_SK: Tensor, mask_TS: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    num_queries, num_heads, dim = q_THK.shape
    scores = (q_THK.float().reshape(num_queries * num_heads, dim) @ keys_SK.T).view(num_queries, num_heads, -1) * scale
    scores = scores.masked_fill(~mask_TS[:, None], -torch.inf)
    sink = sink_H.float()[:, None].expand(num_queries, num_heads, 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    out = probs.reshape(num_queries * num_heads, -1) @ keys_SK
    return out.view_as(q_THK).to(q_THK.dtype)
