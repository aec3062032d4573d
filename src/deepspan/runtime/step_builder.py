"""From the chunks of a step to a `ForwardBatch` on caches: every index of a step, decided on host integers.

Invariants: all tensors of a batch are parts of buffers made once, so that no step allocates or waits for the device; a
chunk that cuts an image is refused by `check_chunk` before it gets here. Rows are written once: of a long chunk, only
the last rows of a block go to a compressor's state, as many as the block keeps. Called by `runtime.runner`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig
from deepspan.core.media import ImageSpan, TokenKind
from deepspan.kv.families import Family
from deepspan.model.batch import (
    AttentionMetadata,
    BatchCaches,
    CompressedMetadata,
    ForwardBatch,
    Part,
    StateSlots,
)
from deepspan.runtime.batch_builder import QUERY_BLOCK, query_blocks
from deepspan.runtime.buffers import Buffer
from deepspan.runtime.caches import Caches
from deepspan.runtime.visibility import num_visible_entries, visible_intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInput:
    """Positions [start, end) of the sequence in a row of the block tables.

    token_ids: int64, kinds: int8, of the chunk. features: encoder rows of its IMAGE tokens in emission order, None
    without any. wanted: positions whose logits are wanted.
    """

    row: int
    start: int
    end: int
    token_ids: np.ndarray
    kinds: np.ndarray
    spans: Sequence[ImageSpan]
    features: Tensor | None
    wanted: Sequence[int]


class StepBuilder:
    """Buffers of one engine."""

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        families: Sequence[Family],
        caches: Caches,
        device: torch.device,
    ) -> None:
        self._config, self._engine, self._caches = config, engine, caches
        self._families = {family.name: family for family in families}
        most, rows = engine.max_batched_tokens, engine.max_num_seqs
        per_token = ("token_ids", "kinds", "positions", "row_lo", "row_hi", "image_rows", "wanted", "window")
        self._buffers = {name: Buffer(most, device) for name in per_token}
        self._buffers |= {name: Buffer(rows, device, torch.int32) for name in ("seqused", "start_pos")}
        for family in families:
            if family.kind == "rows":
                self._buffers[family.name] = Buffer(most // family.ratio + rows, device)
            elif family.kind == "state":
                # Of every part that completes a group, what was kept; of every block that is touched, what it keeps.
                kept = rows * 2 * family.ratio
                self._buffers[f"{family.name}.read"] = Buffer(kept, device)
                for name in ("write", "written"):
                    self._buffers[f"{family.name}.{name}"] = Buffer(most, device)
                self._buffers[f"{family.ratio}.entry_hi"] = Buffer(most, device)
                self._buffers[f"{family.ratio}.positions"] = Buffer(most // family.ratio + rows, device)

    def build(self, chunks: Sequence[ChunkInput]) -> ForwardBatch:
        """One step. The batch is valid until the next call."""
        assert chunks, "a step needs a chunk"
        parts, first = [], 0
        for chunk in chunks:
            parts.append(Part(start=chunk.start, end=chunk.end, first=first, last=first + chunk.end - chunk.start))
            first = parts[-1].last
        kinds = np.concatenate([chunk.kinds for chunk in chunks])
        positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
        image_rows = np.flatnonzero(kinds == TokenKind.IMAGE)
        features = [chunk.features for chunk in chunks if chunk.features is not None]
        num_features = sum(len(rows) for rows in features)
        assert num_features == len(image_rows), f"{num_features} feature rows for {len(image_rows)} IMAGE tokens"
        wanted = [
            np.asarray(chunk.wanted, dtype=np.int64) + (part.first - part.start)
            for chunk, part in zip(chunks, parts, strict=True)
        ]
        fill = self._fill
        return ForwardBatch(
            token_ids=fill("token_ids", np.concatenate([chunk.token_ids for chunk in chunks])),
            kinds=fill("kinds", kinds),
            positions=fill("positions", positions),
            parts=tuple(parts),
            has_images=bool((kinds != TokenKind.TEXT).any()),
            image_rows=fill("image_rows", image_rows),
            image_features=torch.cat(features) if features else None,
            logits_rows=fill("wanted", np.concatenate(wanted)),
            attention=self._attention(chunks, parts),
            caches=BatchCaches(
                layers=self._caches.layers,
                tables=self._caches.tables,
                places=tuple(chunk.row for chunk in chunks),
                window_slots=fill("window", self._slots("window", chunks, parts)),
                seqused=self._fill_whole("seqused", [part.end - part.start for part in parts]),
                start_pos=self._fill_whole("start_pos", [part.start for part in parts]),
            ),
        )

    def _attention(self, chunks: Sequence[ChunkInput], parts: Sequence[Part]) -> AttentionMetadata:
        window = self._config.sliding_window
        intervals = [visible_intervals(chunk.start, chunk.end, window, chunk.spans) for chunk in chunks]
        row_lo, row_hi = (np.concatenate(bounds) for bounds in zip(*intervals, strict=True))
        blocks = {0: query_blocks(parts, QUERY_BLOCK, row_lo, row_hi, 0)}
        compressed: dict[int, CompressedMetadata] = {}
        for ratio in self._config.ratios_in_use():
            blocks[ratio] = query_blocks(parts, QUERY_BLOCK, row_lo, row_hi, ratio)
            compressed[ratio] = self._compressed(ratio, chunks, parts)
        return AttentionMetadata(
            row_lo=self._fill("row_lo", row_lo),
            row_hi=self._fill("row_hi", row_hi),
            compressed=compressed,
            blocks=blocks,
        )

    def _compressed(self, ratio: int, chunks: Sequence[ChunkInput], parts: Sequence[Part]) -> CompressedMetadata:
        groups = [np.arange(part.start // ratio, part.end // ratio) for part in parts]
        slots: dict[str, Tensor] = {}
        for family in self._families.values():
            if family.kind == "rows" and family.ratio == ratio:
                table, size = self._caches.tables_host(family.name), family.block_rows
                found = [
                    table[chunk.row, mine // size] * size + mine % size
                    for chunk, mine in zip(chunks, groups, strict=True)
                ]
                slots[family.name] = self._fill(family.name, np.concatenate(found))
        return CompressedMetadata(
            entry_hi=self._fill(
                f"{ratio}.entry_hi",
                np.concatenate([num_visible_entries(part.start, part.end, ratio) for part in parts]),
            ),
            positions=self._fill(f"{ratio}.positions", np.concatenate(groups) * ratio),
            num_entries=tuple(part.end // ratio for part in parts),
            slots=slots,
            state=self._state(self._families[f"state_{ratio}"], chunks, parts),
        )

    def _state(self, family: Family, chunks: Sequence[ChunkInput], parts: Sequence[Part]) -> StateSlots:
        read, write, written, num_read = [], [], [], []
        size = family.block_tokens
        for chunk, part in zip(chunks, parts, strict=True):
            completes = part.end // family.ratio > part.start // family.ratio
            before = np.arange(family.first_needed(part.start) if completes else part.start, part.start)
            read.append(self._state_slots(family, chunk.row, before))
            num_read.append(len(before))
            positions = np.arange(part.start, part.end)
            block_end = np.minimum(part.end, (positions // size + 1) * size)
            kept = positions[positions >= block_end - family.block_rows]
            write.append(self._state_slots(family, chunk.row, kept))
            written.append(kept + (part.first - part.start))
        return StateSlots(
            read=self._fill(f"{family.name}.read", np.concatenate(read)),
            num_read=tuple(num_read),
            write=self._fill(f"{family.name}.write", np.concatenate(write)),
            written=self._fill(f"{family.name}.written", np.concatenate(written)),
        )

    def _state_slots(self, family: Family, row: int, positions: np.ndarray) -> np.ndarray:
        table = self._caches.tables_host(family.name)
        inside = positions % family.block_tokens % family.block_rows
        return table[row, positions // family.block_tokens] * family.block_rows + inside

    def _slots(self, family: str, chunks: Sequence[ChunkInput], parts: Sequence[Part]) -> np.ndarray:
        table, size = self._caches.tables_host(family), self._engine.block_tokens
        positions = [np.arange(part.start, part.end) for part in parts]
        return np.concatenate(
            [table[chunk.row, mine // size] * size + mine % size for chunk, mine in zip(chunks, positions, strict=True)]
        )

    def _fill(self, name: str, values: np.ndarray) -> Tensor:
        return self._buffers[name].fill(values)

    def _fill_whole(self, name: str, values: Sequence[int]) -> Tensor:
        """Values at the start and zeros behind: what an earlier, larger step left must not count."""
        buffer = self._buffers[name]
        buffer.host[:] = 0
        buffer.host[: len(values)] = values
        return buffer.upload(len(buffer.host))
