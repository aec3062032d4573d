"""From sequences to a `ForwardBatch`: positions, kinds, visibility, entry ranges, all decided on host integers.

Invariants: sequences lie one after the other in flat rows and never see each other; a block of queries lies in one
sequence; every decision is taken here, so that the network asks the device nothing. `assemble` is what whole sequences
and continued ones share; `build_batch` makes batches of whole ones, for a trainer, a profile and tests, and
`runtime.step_builder` adds caches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

Store = Callable[[str, np.ndarray], Tensor]  # puts the values of a named field on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """Positions of one sequence from `start` on. token_ids: int64 [T]; kinds: int8 [T].

    spans: of the whole sequence. features: encoder rows of the IMAGE tokens in emission order [F, D], None without any.
    wanted: positions whose logits are wanted.
    """

    token_ids: np.ndarray
    kinds: np.ndarray
    spans: Sequence[ImageSpan]
    features: Tensor | None
    wanted: Sequence[int]
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def build_batch(
    sequences: Sequence[SequenceInput],
    config: ModelConfig,
    device: torch.device | str,
    query_block: int = QUERY_BLOCK,
) -> ForwardBatch:
    """Whole sequences. query_block: queries per block at most; a block never holds two sequences.

    Raises InputError if a sequence's spans do not fit its kinds.
    """
    for sequence in sequences:
        assert sequence.start == 0, "only caches know what came before"
        check_spans(tuple(sequence.spans), sequence.kinds)

    def upload(_name: str, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return assemble(sequences, config, upload, query_block)


def assemble(
    inputs: Sequence[SequenceInput], config: ModelConfig, store: Store, query_block: int = QUERY_BLOCK
) -> ForwardBatch:
    """Everything of a batch that does not depend on caches."""
    assert inputs, "a batch needs a sequence"
    parts: list[Part] = []
    for given in inputs:
        first = parts[-1].last if parts else 0
        parts.append(Part(start=given.start, end=given.end, first=first, last=first + len(given.token_ids)))
    kinds = np.concatenate([given.kinds for given in inputs])
    image_rows = np.flatnonzero(kinds == TokenKind.IMAGE)
    features = [given.features for given in inputs if given.features is not None]
    num_features = sum(len(rows) for rows in features)
    assert num_features == len(image_rows), f"{num_features} feature rows for {len(image_rows)} IMAGE tokens"
    wanted = [
        np.asarray(given.wanted, dtype=np.int64) + (part.first - part.start)
        for given, part in zip(inputs, parts, strict=True)
    ]
    return ForwardBatch(
        token_ids=store("token_ids", np.concatenate([given.token_ids for given in inputs])),
        kinds=store("kinds", kinds),
        positions=store("positions", np.concatenate([np.arange(part.start, part.end) for part in parts])),
        parts=tuple(parts),
        has_images=bool((kinds != TokenKind.TEXT).any()),
        image_rows=store("image_rows", image_rows),
        image_features=torch.cat(features) if features else None,
        logits_rows=store("wanted", np.concatenate(wanted)),
        attention=_attention(inputs, parts, config, store, query_block),
    )


def _attention(
    inputs: Sequence[SequenceInput], parts: Sequence[Part], config: ModelConfig, store: Store, query_block: int
) -> AttentionMetadata:
    intervals = [visible_intervals(one.start, one.end, config.sliding_window, one.spans) for one in inputs]
    row_lo, row_hi = (np.concatenate(bounds) for bounds in zip(*intervals, strict=True))
    compressed: dict[int, CompressedMetadata] = {}
    blocks = {0: query_blocks(parts, query_block, row_lo, row_hi, 0)}
    for ratio in config.ratios_in_use():
        visible = [num_visible_entries(part.start, part.end, ratio) for part in parts]
        compressed[ratio] = CompressedMetadata(
            entry_hi=store(f"{ratio}.entry_hi", np.concatenate(visible)),
            positions=store(f"{ratio}.positions", np.concatenate([new_entries(part, ratio) for part in parts]) * ratio),
            num_entries=tuple(part.end // ratio for part in parts),
        )
        blocks[ratio] = query_blocks(parts, query_block, row_lo, row_hi, ratio)
    return AttentionMetadata(
        row_lo=store("row_lo", row_lo), row_hi=store("row_hi", row_hi), compressed=compressed, blocks=blocks
    )


def new_entries(part: Part, ratio: int) -> np.ndarray:
    """Numbers of the entries whose groups end in a part: int64."""
    return np.arange(part.start // ratio, part.end // ratio)


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
