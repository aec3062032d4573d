"""One layer over parallel streams: the backbone is made of these, and so are draft stages.

`MergesStreams` is what stands between the last of them and a head.

Shapes: T flat rows, n streams, D hidden.
"""

import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.model.attention import Attention
from deepspan.model.batch import ForwardBatch, LayerCache
from deepspan.model.layers import RMSNorm, empty
from deepspan.model.moe import MoE
from deepspan.model.rope import BatchRope
from deepspan.ops.registry import OpTable


class Block(torch.nn.Module):
    """One layer: attention and MoE, each between a collapse of the streams and their renewal."""

    def __init__(self, config: ModelConfig, ops: OpTable, *, ratio: int, is_hash: bool, dtype: torch.dtype) -> None:
        """ratio: of its compressed entries, 0 without. is_hash: whether text rows choose experts by table."""
        super().__init__()
        self._config, self._ops = config, ops
        num_streams, hidden = config.hc_mult, config.hidden_size
        num_mixes = 2 * num_streams + num_streams**2
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.attn = Attention(config, ops, ratio, dtype)
        self.ffn_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.ffn = MoE(config, ops, dtype, is_hash=is_hash)
        self.hc_attn_fn = empty(num_mixes, num_streams * hidden, dtype=torch.float32)
        self.hc_attn_base = empty(num_mixes, dtype=torch.float32)
        self.hc_attn_scale = empty(3, dtype=torch.float32)
        self.hc_ffn_fn = empty(num_mixes, num_streams * hidden, dtype=torch.float32)
        self.hc_ffn_base = empty(num_mixes, dtype=torch.float32)
        self.hc_ffn_scale = empty(3, dtype=torch.float32)

    def forward(self, streams_TnD: Tensor, batch: ForwardBatch, rope: BatchRope, cache: LayerCache | None) -> Tensor:
        x, post, mix = self._collapse(streams_TnD, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        streams_TnD = self._ops.hyper_post(self.attn(self.attn_norm(x), batch, rope, cache), streams_TnD, post, mix)
        x, post, mix = self._collapse(streams_TnD, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        return self._ops.hyper_post(self.ffn(self.ffn_norm(x), batch), streams_TnD, post, mix)

    def _collapse(self, streams_TnD: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        return self._ops.hyper_pre(
            streams_TnD, fn, base, scale, config.hc_sinkhorn_iters, config.rms_norm_eps, config.hc_eps
        )


class MergesStreams(torch.nn.Module):
    """What has a head: parameters `hc_head_*` merge the streams before it. They lie beside its other parameters."""

    hc_head_fn: torch.nn.Parameter
    hc_head_base: torch.nn.Parameter
    hc_head_scale: torch.nn.Parameter

    def add_merge(self, config: ModelConfig) -> None:
        """Called by the constructor."""
        num_streams = config.hc_mult
        self.hc_head_fn = empty(num_streams, num_streams * config.hidden_size, dtype=torch.float32)
        self.hc_head_base = empty(num_streams, dtype=torch.float32)
        self.hc_head_scale = empty(1, dtype=torch.float32)

    def merge(self, streams_TnD: Tensor, config: ModelConfig, ops: OpTable) -> Tensor:
        """One row of the streams of each: [T, D], before any norm."""
        return ops.hyper_head(
            streams_TnD, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, config.rms_norm_eps, config.hc_eps
        )
