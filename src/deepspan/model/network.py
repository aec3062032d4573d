"""The whole network: embedding with image rows merged in, layers over parallel streams, head; and the image encoder.

Parameter names are those of the released checkpoint. `forward` takes everything by argument and keeps nothing. Image
rows are told by kind, never by id. The streams between layers are the only residual path.

Shapes: T flat rows, n streams, D hidden, R rows whose logits are wanted, V vocabulary, F image feature rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.core.media import TokenKind
from deepspan.model.attention import Attention
from deepspan.model.batch import ForwardBatch, LayerCache
from deepspan.model.layers import Embedding, Linear, RMSNorm, empty
from deepspan.model.moe import MoE
from deepspan.model.rope import BatchRope, RopeTables
from deepspan.model.vision import Aligner, Grid, VisionTower
from deepspan.ops.registry import OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutput:
    """logits: fp32 [R, V]. streams: raw streams [T, n, D] after each layer asked for, by layer index."""

    logits: Tensor
    streams: dict[int, Tensor]


class Block(torch.nn.Module):
    """One layer: attention and MoE, each between a collapse of the streams and their renewal."""

    def __init__(self, config: ModelConfig, ops: OpTable, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._config, self._ops = config, ops
        num_streams, hidden = config.hc_mult, config.hidden_size
        num_mixes = 2 * num_streams + num_streams**2
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.attn = Attention(config, ops, config.compress_ratios[layer], dtype)
        self.ffn_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.ffn = MoE(config, ops, layer, dtype)
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


class DeepseekV4(torch.nn.Module):
    """DeepSeek-V4, with its vision side if the configuration has one."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype) -> None:
        """dtype: of activations and of the large matrices; what must be fp32 is fp32 whatever it says."""
        super().__init__()
        self.config, self._ops, self.dtype = config, ops, dtype
        self._rope: RopeTables | None = None
        hidden, num_streams = config.hidden_size, config.hc_mult
        self.embed = Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = torch.nn.ModuleList(Block(config, ops, i, dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.head = Linear(hidden, config.vocab_size, dtype=torch.float32)
        self.hc_head_fn = empty(num_streams, num_streams * hidden, dtype=torch.float32)
        self.hc_head_base = empty(num_streams, dtype=torch.float32)
        self.hc_head_scale = empty(1, dtype=torch.float32)
        if config.vision is not None:
            self.vision = VisionTower(config.vision, ops, dtype)
            self.aligner = Aligner(config.vision, hidden, ops, dtype)
            self.image_start = empty(hidden, dtype=dtype)
            self.image_pad = empty(hidden, dtype=dtype)
            self.image_newline = empty(hidden, dtype=dtype)
            self.image_end = empty(hidden, dtype=dtype)

    def encode_images(self, patches_NP: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Feature rows of all images, raster order inside each: [F, D].

        patches_NP: fp32, images one after the other; grids: patch rows and columns of each.
        """
        assert self.config.vision is not None, "images need a vision checkpoint"
        return self.aligner(self.vision(patches_NP.to(self.dtype), grids), grids)

    def forward(self, batch: ForwardBatch, stream_taps: Sequence[int] = ()) -> NetworkOutput:
        """Logits of `batch.logits_rows`, and the streams after the layers in `stream_taps`."""
        rope = BatchRope(self._rope_tables(batch.positions.device), batch.positions)
        rows = self._embed(batch)
        streams = rows[:, None].expand(-1, self.config.hc_mult, -1)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            streams = layer(streams, batch, rope, batch.caches.layers[index] if batch.caches is not None else None)
            if index in stream_taps:
                taps[index] = streams
        return NetworkOutput(logits=self._logits(streams[batch.logits_rows]), streams=taps)

    def _rope_tables(self, device: torch.device) -> RopeTables:
        """Made at the first forward pass on a device, and kept."""
        if self._rope is None or self._rope.device != device:
            self._rope = RopeTables(self.config, device)
        return self._rope

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """[T, D]. Text rows from the vocabulary, sentinels from their vectors, IMAGE rows from the encoder."""
        if not batch.has_images:
            return self.embed(batch.token_ids)
        assert self.config.vision is not None, "images need a vision checkpoint"
        is_text = batch.kinds == TokenKind.TEXT
        rows = self.embed(batch.token_ids.masked_fill(~is_text, 0))
        # Indexed by kind; the slot of IMAGE is a filler that the features replace below.
        sentinels = torch.stack((self.image_start, self.image_pad, self.image_pad, self.image_newline, self.image_end))
        rows = torch.where(is_text[:, None], rows, sentinels[batch.kinds.clamp(min=0)])
        if batch.image_features is not None:
            rows = rows.index_copy(0, batch.image_rows, batch.image_features.to(rows.dtype))
        return rows

    def _logits(self, streams_RnD: Tensor) -> Tensor:
        config = self.config
        merged = self._ops.hyper_head(
            streams_RnD, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, config.rms_norm_eps, config.hc_eps
        )
        return self.head(self.norm(merged))
