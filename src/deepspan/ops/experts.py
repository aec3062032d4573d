"""Routed experts: clamped SwiGLU networks, each applied to the tokens that chose it.

Shapes: T tokens, D hidden, I intermediate, E experts, A experts per token.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(gate) * up` in fp32; gate is limited from above only, up on both sides. No limit if it is not positive."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def routed_experts(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    limit: float,
) -> Tensor:
    """Sum over the chosen experts of `w2 (weight * swiglu(w1 x, w3 x))`, accumulated in fp32: [T, D].

    w1, w3: E tensors [I, D]; w2: E tensors [D, I], in x's dtype. The weight multiplies before the second projection, as
    in the release. A token's sum is always taken in order of expert ids, whatever else is in the batch.
    """

    def run(expert: int, x: Tensor, weights: Tensor) -> Tensor:
        hidden = clamped_swiglu(F.linear(x, w1[expert]), F.linear(x, w3[expert]), limit)
        return F.linear((hidden * weights).to(x.dtype), w2[expert])

    return sum_over_experts(x_TD, expert_ids_TA, weights_TA, len(w1), run)


def sum_over_experts(
    x_TD: Tensor,
    expert_ids_TA: Tensor,
    weights_TA: Tensor,
    num_experts: int,
    run: Callable[[int, Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum over the chosen experts in fp32, in order of expert ids: [T, D].

    run: (expert, its rows [S, D], their weights [S, 1]) -> [S, D].
    """
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(num_experts):
        rows, slots = torch.where(expert_ids_TA == expert)
        if len(rows) == 0:
            continue
        out = out.index_add(0, rows, run(expert, x_TD[rows], weights_TA[rows, slots, None]).float())
    return out
