"""From the chunks of a step to a `ForwardBatch` on caches: every index of a step, decided on host integers.

Invariants: all tensors of a batch are parts of buffers made once, so that no step allocates or waits for the device; a
chunk that cuts an image is refused by `check_chunk` before it gets here. Rows are written once: of a long chunk, only
the last rows of a block go to a compressor's state, as many as the block keeps. Called by `runtime.runner`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig
from deepspan.kv.families import Family
from deepspan.model.batch import BatchCaches, ForwardBatch, Part, StateSlots
from deepspan.runtime.batch_builder import SequenceInput, assemble, new_entries
from deepspan.runtime.buffers import Buffer
from deepspan.runtime.caches import Caches


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInput(SequenceInput):
    """A chunk of the sequence in a row of the block tables."""

    row: int


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
        self._config, self._caches = config, caches
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

    @property
    def num_bytes(self) -> int:
        """Of all buffers on the device."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def build(self, chunks: Sequence[ChunkInput]) -> ForwardBatch:
        """One step. The batch is valid until the next call."""
        batch = assemble(chunks, self._config, self._fill)
        parts = batch.parts
        compressed = {
            ratio: replace(
                meta,
                slots=self._entry_slots(ratio, chunks, parts),
                state=self._state(self._families[f"state_{ratio}"], chunks, parts),
            )
            for ratio, meta in batch.attention.compressed.items()
        }
        positions = [np.arange(part.start, part.end) for part in parts]
        caches = BatchCaches(
            layers=self._caches.layers,
            tables=self._caches.tables,
            places=tuple(chunk.row for chunk in chunks),
            window_slots=self._fill("window", self._slots(self._families["window"], chunks, positions)),
            seqused=self._buffers["seqused"].fill_whole([part.end - part.start for part in parts]),
            start_pos=self._buffers["start_pos"].fill_whole([part.start for part in parts]),
        )
        return replace(batch, attention=replace(batch.attention, compressed=compressed), caches=caches)

    def _entry_slots(self, ratio: int, chunks: Sequence[ChunkInput], parts: Sequence[Part]) -> dict[str, Tensor]:
        """Where new entries go, by family: entries and the indexer's keys have tables of their own."""
        entries = [new_entries(part, ratio) for part in parts]
        return {
            name: self._fill(name, self._slots(family, chunks, entries))
            for name, family in self._families.items()
            if family.kind == "rows" and family.ratio == ratio
        }

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

    def _slots(self, family: Family, chunks: Sequence[ChunkInput], numbers: Sequence[np.ndarray]) -> np.ndarray:
        """Slots of a family's rows by their numbers in each chunk's sequence, chunks one after the other."""
        table, size = self._caches.tables_host(family.name), family.block_rows
        found = [table[chunk.row, own // size] * size + own % size for chunk, own in zip(chunks, numbers, strict=True)]
        return np.concatenate(found)

    def _fill(self, name: str, values: np.ndarray) -> Tensor:
        return self._buffers[name].fill(values)
