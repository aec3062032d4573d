"""Lightning indexer: which compressed entries a query of a ratio-4 layer attends to.

Shapes: T queries, H index heads, K index head dim, N entries, M = top-k. Scores only select: no gradient passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspan.ops.blocks import QueryBlock
from deepspan.ops.topk import stable_topk


def index_scores(q_THK: Tensor, k_NK: Tensor, weights_TH: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . k)` in fp32: [T, N]. weights_TH already hold the factor 1 / sqrt(K H)."""
    scores = torch.einsum("thk,nk->thn", q_THK.float(), k_NK.float()).relu_()
    return torch.einsum("thn,th->tn", scores, weights_TH.float())


def select_entries(scores_TN: Tensor, entry_lo_T: Tensor, entry_hi_T: Tensor, topk: int) -> Tensor:
    """The `topk` best of the entries [lo, hi) of each row: int64 [T, min(topk, N)], -1 where there are fewer.

    Equal scores are taken in order of the entries, so that the choice never depends on the batch.
    """
    entries = torch.arange(scores_TN.shape[1], device=scores_TN.device)
    visible = (entries >= entry_lo_T[:, None]) & (entries < entry_hi_T[:, None])
    chosen = stable_topk(scores_TN.masked_fill(~visible, -torch.inf), min(topk, scores_TN.shape[1]))
    return chosen.masked_fill(~visible.gather(1, chosen), -1)


@torch.no_grad()
def index_entries(
    q_THK: Tensor,
    k_NK: Tensor,
    weights_TH: Tensor,
    entry_lo_T: Tensor,
    entry_hi_T: Tensor,
    topk: int,
    blocks: Sequence[QueryBlock],
) -> Tensor:
    """Score and select, a block of queries at a time over the entries any of them can see.

    entry_lo, entry_hi: int64 [T], half-open ranges of flat entries. blocks cover all queries once, in order.
    Returns flat entries, int64 [T, topk], -1 where fewer are visible.
    """
    chosen = torch.full((len(q_THK), topk), -1, dtype=torch.int64, device=q_THK.device)
    for block in blocks:
        (q0, q1), (e0, e1) = block.queries, block.entries
        if e1 == e0:
            continue
        scores = index_scores(q_THK[q0:q1], k_NK[e0:e1], weights_TH[q0:q1])
        local = select_entries(scores, entry_lo_T[q0:q1] - e0, entry_hi_T[q0:q1] - e0, topk)
        chosen[q0:q1, : local.shape[1]] = torch.where(local < 0, local, local + e0)
    return chosen
