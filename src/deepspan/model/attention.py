"""Attention of one layer: a window of raw rows, compressed entries if the layer has a ratio, and a sink.

Invariants: one vector per token is key and value of all heads; since values carry the rotation, the output is rotated
back at the query's position; the compressed side is causal for image rows too (only the raw interval widens).

Shapes: T rows, D hidden, H heads, K head dim, G groups, N entries.
"""

from itertools import accumulate

import torch
from torch import Tensor

from deepspan.config.model import OVERLAP_RATIO, ModelConfig
from deepspan.model.batch import BatchCaches, CompressedMetadata, ForwardBatch, LayerCache
from deepspan.model.compressor import Compressor
from deepspan.model.layers import Linear, RMSNorm, empty
from deepspan.model.rope import BatchRope
from deepspan.ops.registry import OpTable
from deepspan.ops.rows import FlatRows, PagedRows, Rows, store_rows


class Indexer(torch.nn.Module):
    """Chooses the `index_topk` entries a query attends to, in ratio-4 layers."""

    def __init__(self, config: ModelConfig, ops: OpTable, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self._ops = ops
        self.wq_b = Linear(config.q_lora_rank, self.num_heads * self.dim, dtype=dtype)
        self.weights_proj = Linear(config.hidden_size, self.num_heads, dtype=dtype)
        self.compressor = Compressor(config, ops, ratio, self.dim, dtype)

    def forward(self, x_TD: Tensor, qr_TQ: Tensor, batch: ForwardBatch, keys: Rows, rope: BatchRope) -> Tensor:
        """Entries each row attends to: int64 [T, M], -1 for none. qr_TQ: normed low-rank queries. keys: see `keys`."""
        ratio = self.compressor.ratio
        q = self.wq_b(qr_TQ).unflatten(-1, (self.num_heads, self.dim))
        q = self._ops.apply_rope(q, *rope.rows(compressed=True))
        weights = self.weights_proj(x_TD).float() * (self.dim * self.num_heads) ** -0.5
        meta = batch.attention
        return self._ops.index_entries(q, keys, weights, meta.compressed[ratio].entry_hi, self.topk, meta.blocks[ratio])


class Attention(torch.nn.Module):
    """Low-rank queries, one shared key-value vector, grouped low-rank output."""

    def __init__(self, config: ModelConfig, ops: OpTable, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio, self._ops, self._eps = ratio, ops, config.rms_norm_eps
        self.num_heads, self.dim, self.num_groups = config.num_attention_heads, config.head_dim, config.o_groups
        self._rope_dims = config.qk_rope_head_dim
        width = self.num_heads * self.dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, dtype=dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, self._eps, ops, dtype=dtype)
        self.wq_b = Linear(config.q_lora_rank, width, dtype=dtype)
        self.wkv = Linear(config.hidden_size, self.dim, dtype=dtype)
        self.kv_norm = RMSNorm(self.dim, self._eps, ops, dtype=dtype)
        self.wo_a = Linear(width // self.num_groups, self.num_groups * config.o_lora_rank, dtype=dtype)
        self.wo_b = Linear(self.num_groups * config.o_lora_rank, config.hidden_size, dtype=dtype)
        self.attn_sink = empty(self.num_heads, dtype=torch.float32)
        self.compressor = Compressor(config, ops, ratio, self.dim, dtype) if ratio else None
        self.indexer = Indexer(config, ops, ratio, dtype) if ratio == OVERLAP_RATIO else None

    def forward(self, x_TD: Tensor, batch: ForwardBatch, rope: BatchRope, cache: LayerCache | None) -> Tensor:
        """x_TD: output of `attn_norm`. cache: read and written where the batch continues sequences. Returns [T, D]."""
        meta = batch.attention
        cos, sin = rope.rows(compressed=self.ratio > 0)
        qr = self.q_norm(self.wq_a(x_TD))
        q = self.wq_b(qr).unflatten(-1, (self.num_heads, self.dim))
        q = self._ops.apply_rope(self._ops.rms_norm(q, None, self._eps), cos, sin)
        # Every row of the batch is stored before any is read: rows of an image see those behind them.
        new = self.new_rows(x_TD, rope)
        if cache is None or batch.caches is None:
            rows: Rows = FlatRows(rows=new, firsts=tuple(part.first for part in batch.parts))
        else:
            slots = batch.caches.window_slots
            rows = _store(new, cache.window, "window", slots, batch.caches, self._rope_dims)
        entries = selected = None
        entry_hi = meta.row_lo
        if self.compressor is not None:
            compressed = meta.compressed[self.ratio]
            entry_hi = compressed.entry_hi
            new = self.compressor(x_TD, batch, compressed, rope.tables, cache.state if cache is not None else None)
            kept = cache.entries if cache is not None else None
            entries = _store_entries(new, f"rows_{self.ratio}", compressed, batch, kept, self._rope_dims)
            if self.indexer is not None:
                selected = self._select(self.indexer, x_TD, qr, batch, rope, cache)
        out = self._ops.sparse_attention(
            q, rows, meta.row_lo, meta.row_hi, entries, entry_hi, selected,
            self.attn_sink, self.dim**-0.5, meta.blocks[self.ratio],
        )  # fmt: skip
        return self._project_out(self._ops.apply_rope(out, cos, sin, inverse=True))

    def new_rows(self, x_TD: Tensor, rope: BatchRope) -> Tensor:
        """Raw rows, each key and value of all heads: [T, K]."""
        return self._ops.apply_rope(self.kv_norm(self.wkv(x_TD)), *rope.rows(compressed=self.ratio > 0))

    def _select(
        self,
        indexer: Indexer,
        x_TD: Tensor,
        qr_TQ: Tensor,
        batch: ForwardBatch,
        rope: BatchRope,
        cache: LayerCache | None,
    ) -> Tensor | None:
        """The indexer's choice, or None where no sequence has more entries than it may choose: then all are taken."""
        compressed = batch.attention.compressed[self.ratio]
        chooses = max(compressed.num_entries) > indexer.topk
        if cache is None and not chooses:
            return None
        state = cache.index_state if cache is not None else None
        new = indexer.compressor(x_TD, batch, compressed, rope.tables, state)
        kept = cache.index if cache is not None else None
        keys = _store_entries(new, f"index_{self.ratio}", compressed, batch, kept, self._rope_dims)
        return indexer(x_TD, qr_TQ, batch, keys, rope) if chooses else None

    def _project_out(self, out_THK: Tensor) -> Tensor:
        """Each group of heads has its own first projection; `wo_a` [G * rank, H K / G] holds them stacked."""
        grouped = out_THK.flatten(1).unflatten(-1, (self.num_groups, -1))
        return self.wo_b(self.wo_a.by_group(grouped).flatten(1))


def _store_entries(
    new_NK: Tensor,
    family: str,
    meta: CompressedMetadata,
    batch: ForwardBatch,
    cache: Tensor | None,
    rope_dims: int,
) -> Rows:
    """All entries of every sequence: the new ones alone, or what a cache holds once they are stored in it."""
    if cache is None or batch.caches is None:
        firsts = accumulate(meta.num_entries[:-1], initial=0)
        return FlatRows(rows=new_NK, firsts=tuple(firsts))
    assert meta.slots is not None, "a cache needs slots"
    return _store(new_NK, cache, family, meta.slots[family], batch.caches, rope_dims)


def _store(
    new_NK: Tensor, cache: Tensor, family: str, slots_N: Tensor, caches: BatchCaches, rope_dims: int
) -> PagedRows:
    """Write rows to their slots; returns all rows that the cache holds of each sequence."""
    store_rows(new_NK, cache, slots_N, rope_dims)
    packed = (new_NK.shape[1], rope_dims) if cache.dtype == torch.uint8 else None
    return PagedRows(cache=cache, tables=caches.tables[family], places=caches.places, packed=packed)
