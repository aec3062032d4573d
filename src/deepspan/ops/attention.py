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
        keys = [rows.read(block.sequence, r0, r1)]
        masks = [_between(torch.arange(r0, r1, device=q_THK.device), row_lo_T[q0:q1], row_hi_T[q0:q1] + 1)]
        if entries is not None and num_entries > 0:
            if selected_TM is not None and q1 - q0 == 1:  # reading what was chosen is cheaper than masking the rest
                chosen = selected_TM[q0]
                keys.append(entries.pick(block.sequence, chosen.clamp(min=0)))
                masks.append((chosen >= 0)[None])
            else:
                keys.append(entries.read(block.sequence, 0, num_entries))
                visible = torch.arange(num_entries, device=q_THK.device) < entry_hi_T[q0:q1, None]
                masks.append(visible if selected_TM is None else visible & _chosen(selected_TM[q0:q1], num_entries))
        outputs += _attend(q_THK[q0:q1], torch.cat(keys).float(), torch.cat(masks, dim=1), sink_H, scale)
    return torch.cat(outputs)


def _between(ids: Tensor, lo_T: Tensor, hi_T: Tensor) -> Tensor:
    return (ids >= lo_T[:, None]) & (ids < hi_T[:, None])


def _chosen(selected_TM: Tensor, width: int) -> Tensor:
    """Entries -> mask [T, width]; -1 falls into a spare column that is cut off."""
    columns = torch.where(selected_TM < 0, width, selected_TM)
    mask = torch.zeros(len(selected_TM), width + 1, dtype=torch.bool, device=selected_TM.device)
    return mask.scatter_(1, columns, True)[:, :width]


def _attend(q_THK: Tensor, keys_SK: Tensor, mask_TS: Tensor, sink_H: Tensor, scale: float) -> list[Tensor]:
    """Some queries at a time, so that the scores of a long context stay small."""
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
