"""Which drafted tokens are taken: the rules, on distributions.

Invariant: whatever is drafted, what comes out follows the target's own law: greedy gives the target's largest logits,
sampling its distribution. Laws are checked by enumeration in the tests. Everything is in float64 and log space.

Shapes: V vocabulary, N drafts. `log_p`: what the target would choose from, after temperature and cuts; `log_q`: what a
draft was drawn from, None where it was the drafter's likeliest token (then all of q lies on it).
Sources: speculative sampling (standard rule); block verification.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def log_distribution(probs_K: Tensor, ids_K: Tensor, vocab_size: int) -> Tensor:
    """Logarithms over the whole vocabulary, float64 [V], of a distribution over some tokens."""
    logs = torch.full((vocab_size,), -torch.inf, dtype=torch.float64)
    logs[ids_K.cpu()] = probs_K.double().cpu().log()
    return logs


def accepts(log_p_V: Tensor, log_q_V: Tensor | None, draft: int, point: float) -> bool:
    """Standard rule: take the draft with probability min(1, p / q). point: uniform on [0, 1)."""
    log_q = 0.0 if log_q_V is None else float(log_q_V[draft])
    log_u = float(torch.tensor(point, dtype=torch.float64).log())
    return float(log_p_V[draft]) > log_u + log_q


def residual(log_p_V: Tensor, log_q_V: Tensor | None, draft: int, log_share: float = 0.0) -> Tensor:
    """Log weights of max(share p - q, 0), what is drawn from where a draft was not taken.

    log_share: of p, at most 0 (block verification). Where rounding leaves nothing, p itself.
    """
    log_p = log_p_V + log_share
    if log_q_V is None:
        weights = log_p_V.clone() if log_share == 0 else log_p
        weights[draft] = -torch.inf
    else:
        # log(e^p - e^q) = p + log1p(-e^(q - p)) where q is smaller; where p is 0 nothing is left to take from.
        ratio = torch.where(log_p > log_q_V, log_q_V - log_p, 0.0)
        weights = torch.where(log_p > log_q_V, log_p + torch.log1p(-ratio.exp()), -torch.inf)
    weights = weights.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return weights if bool((weights > -torch.inf).any()) else log_p_V


def draw(log_weights_V: Tensor, point: float) -> int:
    """Token by inverse cumulative weights. point: uniform on [0, 1)."""
    cumulative = (log_weights_V - log_weights_V.max()).exp().cumsum(0)
    aim = torch.tensor(point * float(cumulative[-1]), dtype=cumulative.dtype)
    index = int(torch.searchsorted(cumulative, aim, right=True))
    last = int(torch.nonzero(log_weights_V > -torch.inf)[-1])  # rounding must not point behind it
    return min(index, last)


def block_length(
    log_p: Sequence[Tensor], log_q: Sequence[Tensor | None], drafts: Sequence[int], points: Sequence[float]
) -> tuple[int, float]:
    """Block verification: how many drafts are taken together, and the log share of p where the next token is drawn.

    log_p: of the N + 1 rows; log_q, drafts, points: of the N drafts. Later slots are tested even after one failed: the
    longest that passes counts. Takes at least as many as the standard rule on average, under the same law.
    """
    log_ratio, taken, share = 0.0, 0, 0.0
    for index, draft in enumerate(drafts):
        q = log_q[index]
        # What is no number stays one (it is the first argument), and passes no comparison below.
        log_ratio = min(log_ratio + float(log_p[index][draft]) - (0.0 if q is None else float(q[draft])), 0.0)
        if index == len(drafts) - 1:
            passes = _exp(log_ratio)
        else:
            left = _mass(log_p[index + 1], log_q[index + 1], drafts[index + 1], log_ratio)
            rest = left + 1.0 - _exp(log_ratio)
            passes = left / rest if rest != 0 else 1.0
        if points[index] < passes and log_ratio > -torch.inf:
            taken, share = index + 1, log_ratio
    return taken, share


def _mass(log_p_V: Tensor, log_q_V: Tensor | None, draft: int, log_share: float) -> float:
    """Sum of max(share p - q, 0)."""
    p = (log_p_V + log_share).exp()
    if log_q_V is None:
        return float(p.sum() - p[draft])  # q is 1 there, p at most 1
    return float((p - log_q_V.exp()).clamp(min=0).sum())


def _exp(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).exp())
