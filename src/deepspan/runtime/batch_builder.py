"""From sequences to a `ForwardBatch`: positions, kinds, visibility, entry ranges, all decided on host integers.

Invariants: sequences lie one after the other in flat rows and never see each other; a block of queries lies in one
sequence; every decision is taken here, so that the network asks the device nothing. Each sequence is complete, from
position 0. Used by `runtime.runner` and by a trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.core.media import ImageSpan, TokenKind
from deepspan.core.request import check_spans
from deepspan.model.batch import AttentionMetadata, CompressedMetadata, ForwardBatch, Part
from deepspan.ops.blocks import QueryBlock
from deepspan.runtime.visibility import num_visible_entries, visible_intervals

QUERY_BLOCK = 128  # queries scored together: bounds the score matrix, and lets far rows be skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """One sequence from position 0. token_ids: int64 [T]; kinds: int8 [T].

    features: encoder rows of its IMAGE tokens in emission order [F, D], None without images.
    wanted: positions whose logits are wanted.
    """

    token_ids: np.ndarray
    kinds: np.ndarray
    spans: tuple[ImageSpan, ...]
    features: Tensor | None
    wanted: Sequence[int]


def build_batch(
    sequences: Sequence[SequenceInput],
    config: ModelConfig,
    device: torch.device | str,
    query_block: int = QUERY_BLOCK,
) -> ForwardBatch:
    """query_block: queries per block at most; a block never holds two sequences.

    Raises InputError if a sequence's spans do not fit its kinds.
    """
    assert sequences, "a batch needs a sequence"
    for sequence in sequences:
        check_spans(sequence.spans, sequence.kinds)
    lengths = [len(sequence.token_ids) for sequence in sequences]
    firsts = [0, *accumulate(lengths[:-1])]
    parts = tuple(
        Part(start=0, end=length, first=first, last=first + length)
        for length, first in zip(lengths, firsts, strict=True)
    )
    kinds = np.concatenate([sequence.kinds for sequence in sequences])

    def upload(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    image_rows = np.flatnonzero(kinds == TokenKind.IMAGE)
    features = [sequence.features for sequence in sequences if sequence.features is not None]
    num_features = sum(len(rows) for rows in features)
    assert num_features == len(image_rows), f"{num_features} feature rows for {len(image_rows)} IMAGE tokens"
    wanted = [np.asarray(seq.wanted, dtype=np.int64) + first for seq, first in zip(sequences, firsts, strict=True)]
    return ForwardBatch(
        token_ids=upload(np.concatenate([sequence.token_ids for sequence in sequences])),
        kinds=upload(kinds),
        positions=upload(np.concatenate([np.arange(length) for length in lengths])),
        parts=parts,
        has_images=bool((kinds != TokenKind.TEXT).any()),
        image_rows=upload(image_rows),
        image_features=torch.cat(features) if features else None,
        logits_rows=upload(np.concatenate(wanted)),
        attention=_attention_metadata(sequences, parts, config, upload, query_block),
    )


def _attention_metadata(
    sequences: Sequence[SequenceInput],
    parts: Sequence[Part],
    config: ModelConfig,
    upload: Callable[[np.ndarray], Tensor],
    query_block: int,
) -> AttentionMetadata:
    intervals = [
        visible_intervals(0, part.end, config.sliding_window, sequence.spans)
        for sequence, part in zip(sequences, parts, strict=True)
    ]
    row_lo, row_hi = (np.concatenate(bounds) for bounds in zip(*intervals, strict=True))
    compressed: dict[int, CompressedMetadata] = {}
    blocks = {0: query_blocks(parts, query_block, row_lo, row_hi, 0)}
    for ratio in config.ratios_in_use():
        counts = [part.end // ratio for part in parts]
        compressed[ratio] = CompressedMetadata(
            entry_hi=upload(np.concatenate([num_visible_entries(0, part.end, ratio) for part in parts])),
            positions=upload(np.concatenate([np.arange(count) * ratio for count in counts])),
            num_entries=tuple(counts),
        )
        blocks[ratio] = query_blocks(parts, query_block, row_lo, row_hi, ratio)
    return AttentionMetadata(row_lo=upload(row_lo), row_hi=upload(row_hi), compressed=compressed, blocks=blocks)


def query_blocks(
    parts: Sequence[Part], query_block: int, row_lo: np.ndarray, row_hi: np.ndarray, ratio: int
) -> tuple[QueryBlock, ...]:
    """Cut every part into blocks of at most `query_block` queries. row_lo, row_hi: of all flat rows. ratio: or 0."""
    blocks: list[QueryBlock] = []
    for sequence, part in enumerate(parts):
        for first in range(part.first, part.last, query_block):
            rows = slice(first, min(first + query_block, part.last))
            blocks.append(
                QueryBlock(
                    sequence=sequence,
                    queries=(rows.start, rows.stop),
                    rows=(int(row_lo[rows].min()), int(row_hi[rows].max()) + 1),
                    num_entries=(part.start + rows.stop - part.first) // ratio if ratio else 0,
                )
            )
    return tuple(blocks)
