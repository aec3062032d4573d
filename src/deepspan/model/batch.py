"""What a forward pass needs, as tensors and host integers: nothing is looked up anywhere else.

Owns the records between the batch builder (runtime) and the network. Rows of all sequences lie one after the other in
flat rows; every index counts in those, so that a batch of one and a batch of many take the same path.

Shapes: T flat rows, F image feature rows, R rows whose logits are wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspan.ops.blocks import QueryBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedMetadata:
    """Which compressed entries each row may see, for one compress ratio.

    entry_lo, entry_hi: int64 [T], half-open range of flat entries: those of the row's own sequence whose group ends at
    or before the row. positions: int64 [N], first token of each entry's group, in its sequence.
    num_entries: per sequence, sum N.
    """

    entry_lo: Tensor
    entry_hi: Tensor
    positions: Tensor
    num_entries: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Visibility of every row.

    row_lo, row_hi: int64 [T], flat rows seen raw, both ends included (an interval says it all, image spans included).
    compressed: by ratio. blocks: by ratio (0 for window layers), runs of queries with host bounds of all they see.
    """

    row_lo: Tensor
    row_hi: Tensor
    compressed: Mapping[int, CompressedMetadata]
    blocks: Mapping[int, Sequence[QueryBlock]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Complete sequences, from position 0, one after the other.

    token_ids: int64 [T], vocabulary ids of text rows (image rows hold anything; they are told by kind).
    kinds: int64 [T], `core.media.TokenKind`. positions: int64 [T]. lengths: rows per sequence, sum T.
    image_rows: int64 [F], flat rows of kind IMAGE, ascending; image_features: [F, D] for them, or None if F is 0.
    logits_rows: int64 [R].
    """

    token_ids: Tensor
    kinds: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    image_rows: Tensor
    image_features: Tensor | None
    logits_rows: Tensor
    attention: AttentionMetadata
