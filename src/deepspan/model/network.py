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
from deepspan.model.batch import ForwardBatch
from deepspan.model.block import Block, MergesStreams
from deepspan.model.layers import Embedding, Linear, RMSNorm, empty
from deepspan.model.rope import BatchRope, RopeTables
from deepspan.model.vision import Aligner, Grid, VisionTower
from deepspan.ops.registry import OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutput:
    """logits: fp32 [R, V]. streams: raw streams [T, n, D] after each layer asked for, by layer index."""

    logits: Tensor
    streams: dict[int, Tensor]


class DeepseekV4(MergesStreams):
    """DeepSeek-V4, with its vision side if the configuration has one."""

    def __init__(self, config: ModelConfig, ops: OpTable, dtype: torch.dtype) -> None:
        """dtype: of activations and of the large matrices; what must be fp32 is fp32 whatever it says."""
        super().__init__()
        self.config, self._ops, self.dtype = config, ops, dtype
        self._rope: RopeTables | None = None
        hidden = config.hidden_size
        self.embed = Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = torch.nn.ModuleList(
            Block(config, ops, ratio=ratio, is_hash=layer < config.num_hash_layers, dtype=dtype)
            for layer, ratio in enumerate(config.compress_ratios)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype)
        self.head = Linear(hidden, config.vocab_size, dtype=torch.float32)
        self.add_merge(config)
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
        rope = BatchRope(self.rope_tables(batch.positions.device), batch.positions)
        rows = self.embed_rows(batch)
        streams = rows[:, None].expand(-1, self.config.hc_mult, -1)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            streams = layer(streams, batch, rope, batch.caches.layers[index] if batch.caches is not None else None)
            if index in stream_taps:
                taps[index] = streams
        return NetworkOutput(logits=self._logits(streams[batch.logits_rows]), streams=taps)

    def rope_tables(self, device: torch.device) -> RopeTables:
        """Made at the first forward pass on a device, and kept."""
        if self._rope is None or self._rope.device != device:
            self._rope = RopeTables(self.config, device)
        return self._rope

    def embed_rows(self, batch: ForwardBatch) -> Tensor:
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
        return self.head(self.norm(self.merge(streams_RnD, self.config, self._ops)))
