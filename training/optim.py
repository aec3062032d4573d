"""Muon for the matrices inside layers, AdamW for everything else.

Muon orthogonalises each matrix's momentum by a Newton-Schulz iteration; matrices of one shape are handled together,
since there are many small experts.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic of the published method
STEPS = 5


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Dense matrices inside layers, tower and aligner; not embeddings, gates, mixers or position biases."""
    outside = ("embed", "head", "gate", "hc_", "ape", "patch_embed", "probe")
    return parameter.ndim == 2 and not any(part in name for part in outside)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, scaled to the root mean square of an AdamW step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = [self._momentum(parameter, group["momentum"]) for parameter in parameters]
                scale = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        kept = state["momentum"].lerp_(parameter.grad, 1 - momentum)  # type: ignore[arg-type]
        return parameter.grad.lerp(kept, momentum)  # type: ignore[union-attr]


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, a, b] -> matrices with the same row and column spaces and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    # Rough is enough (the polynomial only brings singular values near 1), and bf16 halves the time.
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)).bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
