"""Expert choice: scored or by hash table for text rows, scored with its own bias for image rows.

Shapes: T tokens, D hidden, E experts, A experts per token. Everything is fp32: a bf16 logit can flip an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.ops.topk import stable_topk


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor | None,
    bias_vl_E: Tensor | None,
    is_image_T: Tensor,
    table_VA: Tensor | None,
    token_ids_T: Tensor,
    num_active: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Choose `num_active` experts per token and weigh them.

    score = sqrt(softplus(x . gate)). Text rows take table[id] where a table is given (hash layers), otherwise the best
    of score + bias. Image rows (`is_image_T`, every sentinel kind, lead pads included) take the best of score + bias_vl
    in every layer. Biases shift the choice only: weights are the plain scores of the chosen, normalised to `scaling`.
    bias_vl_E is None for text-only models, whose batches hold no image rows.

    Returns (expert ids int64 [T, A], weights fp32 [T, A]).
    """
    scores = F.softplus(x_TD.float() @ gate_ED.float().T).sqrt()
    if table_VA is not None:
        # Ids of image rows are not vocabulary: they read row 0, and the result is discarded below.
        chosen = table_VA[token_ids_T.masked_fill(is_image_T, 0)].long()
    else:
        assert bias_E is not None, "a scored layer needs its correction bias"
        chosen = stable_topk(scores.detach() + bias_E, num_active)
    if bias_vl_E is not None:
        chosen = torch.where(is_image_T[:, None], stable_topk(scores.detach() + bias_vl_E, num_active), chosen)
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * scaling
