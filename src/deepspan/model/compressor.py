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

    def forward(
        self, x_TD: Tensor, batch: ForwardBatch, meta: CompressedMetadata, tables: RopeTables, state: Tensor | None
    ) -> Tensor:
        """Entries that the batch completes, part after part: [N, K], rotated at the first token of their group.

        state: cache [blocks, rows, 2 width] of the rows of incomplete groups, read and then written; None where every
        part is a whole sequence.
        """
        kv = self.wkv(x_TD)
        gate = self.wgate(x_TD) + F.embedding(batch.positions % self.ratio, self.ape)
        if state is None:
            groups = [
                self._ops.compress_groups(
                    kv[part.first : part.last], gate[part.first : part.last], self.ratio, self.dim
                )
                for part in batch.parts
            ]
        else:
            groups = self._continue(kv, gate, batch, meta, state)
        pooled = torch.cat(groups) if groups else kv.new_empty(0, self.dim)
        cos, sin = tables.at(meta.positions, compressed=True)
        return self._ops.apply_rope(self.norm(pooled.to(self._dtype)), cos, sin)

    def _continue(
        self, kv_TC: Tensor, gate_TC: Tensor, batch: ForwardBatch, meta: CompressedMetadata, state: Tensor
    ) -> list[Tensor]:
        """Pool the groups that end in each part, with the rows kept of earlier parts; then keep what is pending now."""
        assert meta.state is not None, "a state cache needs its slots"
        rows, slots = state.flatten(0, 1), meta.state
        groups = []
        for part, kept in zip(batch.parts, rows[slots.read].split(slots.num_read), strict=True):
            if part.end // self.ratio == part.start // self.ratio:
                continue
            old_kv, old_gate = kept.chunk(2, dim=1)
            # The group before is read for its second half alone; its own entry exists.
            known = part.start // self.ratio - (part.start - len(kept)) // self.ratio
            groups.append(
                self._ops.compress_groups(
                    torch.cat((old_kv, kv_TC[part.first : part.last])),
                    torch.cat((old_gate, gate_TC[part.first : part.last])),
                    self.ratio,
                    self.dim,
                )[known:]
            )
        rows[slots.write] = torch.cat((kv_TC, gate_TC), dim=1)[slots.written]
        return groups
