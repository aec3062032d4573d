"""Lightning indexer: which compressed entries a query of a ratio-4 layer attends to.

Shapes: T queries, H index heads, K index head dim, N entries, M = top-k. Scores only select: no gradient passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspan.ops.blocks import QueryBlock
from deepspan.ops.rows import Rows
from deepspan.ops.topk import stable_topk

MAX_SCORES = 1 << 25  # of single heads, held at once: 128 MB


def index_scores(q_THK: Tensor, k_NK: Tensor, weights_TH: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . k)` in fp32: [T, N]. weights_TH already hold the factor 1 / sqrt(K H)."""
    scores = torch.einsum("thk,nk->thn", q_THK.float(), k_NK.float()).relu_()
    return torch.einsum("thn,th->tn", scores, weights_TH.float())


def select_entries(scores_TN: Tensor, entry_hi_T: Tensor, topk: int) -> Tensor:
    """The `topk` best of the entries [0, hi) of each row: int64 [T, min(topk, N)], -1 where there are fewer.

    Equal scores are taken in order of the entries, so that the choice never depends on the batch.
    """
    visible = torch.arange(scores_TN.shape[1], device=scores_TN.device) < entry_hi_T[:, None]
    chosen = stable_topk(scores_TN.masked_fill(~visible, -torch.inf), min(topk, scores_TN.shape[1]))
    return chosen.masked_fill(~visible.gather(1, chosen), -1)


@torch.no_grad()
def index_entries(
    q_THK: Tensor,
    keys: Rows,
    weights_TH: Tensor,
    entry_hi_T: Tensor,
    topk: int,
    blocks: Sequence[QueryBlock],
) -> Tensor:
    """Score and select, a block of queries at a time over the entries any of them can see.

    keys: index keys [N, K] of each sequence. entry_hi: int64 [T], entries that a row may see. blocks cover all queries
    once, in order. Returns entries of the query's sequence, int64 [T, topk], -1 where fewer are visible.
    """
    chosen = torch.full((len(q_THK), topk), -1, dtype=torch.int64, device=q_THK.device)
    for block in blocks:
        q0, q1 = block.queries
        if block.num_entries == 0:
            continue
        k = keys.read(block.sequence, 0, block.num_entries)
        # Some keys at a time, so that the scores of all heads stay small in a long context.
        most = max(1, MAX_SCORES // ((q1 - q0) * q_THK.shape[1]))
        scores = torch.cat([index_scores(q_THK[q0:q1], part, weights_TH[q0:q1]) for part in k.split(most)], dim=1)
        found = select_entries(scores, entry_hi_T[q0:q1], topk)
        chosen[q0:q1, : found.shape[1]] = found
    return chosen
