"""Manifold-constrained hyper-connections: n parallel residual streams, mixed by a doubly stochastic matrix per token.

Shapes: T tokens, n streams, D hidden. All arithmetic is fp32; streams are stored in the model's dtype between halves.
"""

import torch
from torch import Tensor


def hyper_pre(
    streams_TnD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into a sub-layer's input, and say how its output is spread again.

    fn: fp32 [2n + n^2, nD], base: fp32 [2n + n^2], scale: fp32 [3] for the parts pre, post, mix.
    Returns (input [T, D] in the streams' dtype, post fp32 [T, n], mix fp32 [T, n, n] with columns summing to 1).

    `pre = sigmoid + hc_eps` is not normalised; `post` is `2 sigmoid`; `mix` is a row softmax made doubly stochastic by
    Sinkhorn steps: one column step, then `iters - 1` pairs of row and column steps.
    """
    num_tokens, num_streams, _ = streams_TnD.shape
    wide = streams_TnD.float()
    pre, post, mix = _mixes(wide, fn, norm_eps).split((num_streams, num_streams, num_streams**2), dim=-1)
    base_pre, base_post, base_mix = base.split((num_streams, num_streams, num_streams**2))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    mix = (mix * scale[2] + base_mix).view(num_tokens, num_streams, num_streams).softmax(-1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    return _weighted_sum(pre, wide).to(streams_TnD.dtype), post, mix


def hyper_post(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, mix_Tnn: Tensor) -> Tensor:
    """Spread a sub-layer's output over the mixed streams: `Y_k = post_k out + sum_j mix_jk X_j`.

    The matrix is applied transposed: its rows are old streams, its columns new ones. X are the streams that `hyper_pre`
    saw. Returns [T, n, D] in the streams' dtype.
    """
    wide = streams_TnD.float()
    mixed = torch.matmul(mix_Tnn.transpose(1, 2), wide)
    return (post_Tn[..., None] * out_TD.float()[:, None] + mixed).to(streams_TnD.dtype)


def hyper_head(streams_TnD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    """Merge the streams before the output head: sigmoid weights, no Sinkhorn, not normalised.

    fn: fp32 [n, nD], base: fp32 [n], scale: fp32 [1]. Returns [T, D] in the streams' dtype.
    """
    wide = streams_TnD.float()
    weights = torch.sigmoid(_mixes(wide, fn, norm_eps) * scale + base) + hc_eps
    return _weighted_sum(weights, wide).to(streams_TnD.dtype)


def _mixes(wide_TnD: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """Projection of all streams together, divided by their common root mean square (one factor per token)."""
    flat = wide_TnD.flatten(1)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def _weighted_sum(weights_Tn: Tensor, wide_TnD: Tensor) -> Tensor:
    return torch.matmul(weights_Tn[:, None], wide_TnD).squeeze(1)
