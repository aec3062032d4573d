"""Lightning indexer: which compressed entries a query of a ratio-4 layer attends to.

Shapes: T queries, H index heads, K index head dim, N entries, M = top-k. Scores only select; they carry no gradient
into the attention (a trainer uses `index_scores` directly).
"""

import torch
from torch import Tensor

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
