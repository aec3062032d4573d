"""Compressor: every `ratio` tokens become one entry, a vector that is key and value like a raw row.

Used twice in a ratio-4 layer (entries to attend to; keys of the indexer), once in a ratio-128 layer. Projections, gates
and pooling are fp32; the pooled value is rounded to the model's dtype before its norm, as in the release.

Shapes: T flat rows, D hidden, N entries, K entry width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.config.model import OVERLAP_RATIO, ModelConfig
from deepspan.model.batch import CompressedMetadata, ForwardBatch
from deepspan.model.layers import Linear, RMSNorm, empty
from deepspan.model.rope import RopeTables
from deepspan.ops.registry import OpTable


class Compressor(torch.nn.Module):
    """`wkv`, `wgate` [width, D] with width 2K where groups overlap (ratio 4), `ape` [ratio, width], `norm` [K]."""

    def __init__(self, config: ModelConfig, ops: OpTable, ratio: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio, self.dim, self._ops, self._dtype = ratio, dim, ops, dtype
        width = 2 * dim if ratio == OVERLAP_RATIO else dim
        self.ape = empty(ratio, width, dtype=torch.float32)
        self.wkv = Linear(config.hidden_size, width, dtype=torch.float32)
        self.wgate = Linear(config.hidden_size, width, dtype=torch.float32)
        self.norm = RMSNorm(dim, config.rms_norm_eps, ops, dtype=dtype)

    def forward(self, x_TD: Tensor, batch: ForwardBatch, meta: CompressedMetadata, tables: RopeTables) -> Tensor:
        """Entries of all sequences, one sequence after the other: [N, K], rotated at the first token of their group."""
        kv = self.wkv(x_TD)
        gate = self.wgate(x_TD) + F.embedding(batch.positions % self.ratio, self.ape)
        pooled = [
            self._ops.compress_groups(kv_S, gate_S, self.ratio, self.dim)
            for kv_S, gate_S in zip(kv.split(batch.lengths), gate.split(batch.lengths), strict=True)
        ]
        entries = self.norm(torch.cat(pooled).to(self._dtype))
        cos, sin = tables.at(meta.positions, compressed=True)
        return self._ops.apply_rope(entries, cos, sin)
