"""What a forward pass needs, as tensors and host integers: nothing is looked up anywhere else.

Owns the records between the batch builders (runtime) and the network. Rows of all sequences lie one after the other in
flat rows; what a row sees is counted in its sequence, so that a sequence computed whole and one continued from caches
take the same path.

Shapes: T flat rows, F image feature rows, R rows whose logits are wanted, N new entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspan.ops.blocks import QueryBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's share of a batch, host integers: positions [start, end) lie in flat rows [first, last)."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """Where a compressor's pending rows lie in its state cache, flat slots over all blocks.

    read: int64, slots of the rows before each part that its next entries pool, parts one after the other; num_read: how
    many, per part. write, written: slots, and the flat rows of the batch that go there.
    """

    read: Tensor
    num_read: tuple[int, ...]
    write: Tensor
    written: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedMetadata:
    """Compressed entries of one ratio.

    entry_hi: int64 [T], entries that each row may see: those whose group ends at or before it. positions: int64 [N],
    first token of the group of each entry that this batch completes. num_entries: of each sequence at its end.
    slots: int64 [N], where new entries go in a cache, by family name; state: of its compressors. None without caches.
    """

    entry_hi: Tensor
    positions: Tensor
    num_entries: tuple[int, ...]
    slots: Mapping[str, Tensor] | None = None
    state: StateSlots | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Visibility of every row.

    row_lo, row_hi: int64 [T], rows of its sequence seen raw, both ends included (an interval says it all, image spans
    included). compressed: by ratio. blocks: runs of queries with host bounds of all they see, by ratio (0 for window
    layers).
    """

    row_lo: Tensor
    row_hi: Tensor
    compressed: Mapping[int, CompressedMetadata]
    blocks: Mapping[int, Sequence[QueryBlock]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Caches of one layer, [blocks, rows of a block, width] each; None where the layer has none.

    rows and states as `kv.families` counts them; a state row holds values, then gates, fp32.
    """

    window: Tensor
    entries: Tensor | None
    state: Tensor | None
    index: Tensor | None
    index_state: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCaches:
    """layers: of the whole network. tables: int64 [places, blocks], by family name. places: table row of each part.

    window_slots: int64 [T], where raw rows go. seqused, start_pos: int32 [max_num_seqs], new tokens of each part and
    tokens before it; 0 behind the last part, so that a kernel of fixed shape leaves padding alone.
    """

    layers: Sequence[LayerCache]
    tables: Mapping[str, Tensor]
    places: tuple[int, ...]
    window_slots: Tensor
    seqused: Tensor
    start_pos: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Parts of sequences, one after the other: whole ones without caches, chunks of any length with them.

    token_ids: int64 [T], vocabulary ids of text rows (image rows hold anything; they are told by kind).
    kinds: int64 [T], `core.media.TokenKind`. positions: int64 [T]. has_images: whether any row is not text.
    image_rows: int64 [F], flat rows of kind IMAGE, ascending; image_features: [F, D] for them, or None if F is 0.
    logits_rows: int64 [R].
    """

    token_ids: Tensor
    kinds: Tensor
    positions: Tensor
    parts: tuple[Part, ...]
    has_images: bool
    image_rows: Tensor
    image_features: Tensor | None
    logits_rows: Tensor
    attention: AttentionMetadata
    caches: BatchCaches | None = None
