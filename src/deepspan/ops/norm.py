"""RMSNorm: fp32 inside, plain weight (not 1 + w), one rounding to the input's dtype at the end."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension.

    x: [..., D] any float dtype. weight: [D] or None (per-head q norm has none). Returns x's shape and dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)
