"""From sequences to a `ForwardBatch`: positions, kinds, visibility, entry ranges, all decided on host integers.

Invariants: sequences lie one after the other in flat rows and never see each other; a block of queries lies in one
sequence; every decision is taken here, so that the network asks the device nothing. Each sequence is complete, from
position 0. Used by `runtime.runner` and by a trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspan.config.model import ModelConfig
from deepspan.core.media import ImageSpan, TokenKind
from deepspan.core.request import check_spans
from deepspan.model.batch import AttentionMetadata, CompressedMetadata, ForwardBatch
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
    lengths = tuple(len(sequence.token_ids) for sequence in sequences)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    kinds = np.concatenate([sequence.kinds for sequence in sequences])

    def upload(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    image_rows = np.flatnonzero(kinds == TokenKind.IMAGE)
    features = [sequence.features for sequence in sequences if sequence.features is not None]
    num_features = sum(len(rows) for rows in features)
    assert num_features == len(image_rows), f"{num_features} feature rows for {len(image_rows)} IMAGE tokens"
    wanted = [np.asarray(seq.wanted, dtype=np.int64) + start for seq, start in zip(sequences, starts, strict=True)]
    return ForwardBatch(
        token_ids=upload(np.concatenate([sequence.token_ids for sequence in sequences])),
        kinds=upload(kinds),
        positions=upload(np.concatenate([np.arange(length) for length in lengths])),
        lengths=lengths,
        image_rows=upload(image_rows),
        image_features=torch.cat(features) if features else None,
        logits_rows=upload(np.concatenate(wanted)),
        attention=_attention_metadata(sequences, lengths, starts, config, device, query_block),
    )


def _attention_metadata(
    sequences: Sequence[SequenceInput],
    lengths: tuple[int, ...],
    starts: np.ndarray,
    config: ModelConfig,
    device: torch.device | str,
    query_block: int,
) -> AttentionMetadata:
    intervals = [visible_intervals(len(s.token_ids), config.sliding_window, s.spans) for s in sequences]
    row_lo = np.concatenate([lo + start for (lo, _), start in zip(intervals, starts, strict=True)])
    row_hi = np.concatenate([hi + start for (_, hi), start in zip(intervals, starts, strict=True)])
    no_entries = np.zeros(len(row_lo), dtype=np.int64)
    compressed: dict[int, CompressedMetadata] = {}
    blocks = {0: _query_blocks(lengths, query_block, starts, row_lo, row_hi, no_entries, no_entries)}
    for ratio in config.ratios_in_use():
        counts = np.asarray([length // ratio for length in lengths])
        firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        entry_lo = np.repeat(firsts, lengths)
        entry_hi = entry_lo + np.concatenate([num_visible_entries(length, ratio) for length in lengths])
        compressed[ratio] = CompressedMetadata(
            entry_lo=torch.from_numpy(entry_lo).to(device),
            entry_hi=torch.from_numpy(entry_hi).to(device),
            positions=torch.from_numpy(np.concatenate([np.arange(n) * ratio for n in counts])).to(device),
            num_entries=tuple(int(n) for n in counts),
        )
        blocks[ratio] = _query_blocks(lengths, query_block, starts, row_lo, row_hi, entry_lo, entry_hi)
    return AttentionMetadata(
        row_lo=torch.from_numpy(row_lo).to(device),
        row_hi=torch.from_numpy(row_hi).to(device),
        compressed=compressed,
        blocks=blocks,
    )


def _query_blocks(
    lengths: tuple[int, ...],
    query_block: int,
    starts: np.ndarray,
    row_lo: np.ndarray,
    row_hi: np.ndarray,
    entry_lo: np.ndarray,
    entry_hi: np.ndarray,
) -> tuple[QueryBlock, ...]:
    blocks: list[QueryBlock] = []
    for length, start in zip(lengths, starts.tolist(), strict=True):
        for first in range(start, start + length, query_block):
            part = slice(first, min(first + query_block, start + length))
            blocks.append(
                QueryBlock(
                    queries=(part.start, part.stop),
                    rows=(int(row_lo[part].min()), int(row_hi[part].max()) + 1),
                    entries=(int(entry_lo[part].min()), int(entry_hi[part].max())),
                )
            )
    return tuple(blocks)
