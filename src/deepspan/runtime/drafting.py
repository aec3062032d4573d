"""Runs a drafter beside the network: keeps its context, and guesses the next tokens of running requests.

Owns the drafter's caches' indices; its buffers are its own, so that nothing of a draft step can overwrite what a step
of the network reads. Invariants: the context of a row is written whenever the network computes the row, whether
anybody drafts in that step or not; a block of slots is stored where its tokens would stand and is overwritten by their
context; what one request is guessed never depends on the others. Called by `runtime.runner`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig
from deepspan.core.media import TokenKind
from deepspan.kv.families import DRAFT
from deepspan.model.batch import AttentionMetadata, BatchCaches, ForwardBatch, Part
from deepspan.model.drafter import DSpark, slot_tokens
from deepspan.model.network import DeepseekV4
from deepspan.model.rope import BatchRope
from deepspan.ops.rows import store_rows
from deepspan.runtime.batch_builder import query_blocks
from deepspan.runtime.buffers import Buffer
from deepspan.runtime.caches import Caches
from deepspan.runtime.choosing import Drafts, RunningRow
from deepspan.runtime.sampler import Purpose, uniform
from deepspan.runtime.verification import draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Where a request's guesses begin. place: its row of the block tables. position: of its newest token.

    count: guesses wanted, at least one.
    """

    row: RunningRow
    place: int
    position: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What a step has computed of a request for good: positions [start, end). place: its row of the block tables.

    features: encoder rows of the IMAGE tokens among them.
    """

    row: RunningRow
    place: int
    start: int
    end: int
    features: Tensor | None


class Drafting:
    """One drafter with its caches."""

    def __init__(
        self,
        drafter: DSpark,
        network: DeepseekV4,
        config: ModelConfig,
        engine: EngineConfig,
        caches: Caches,
        device: torch.device,
    ) -> None:
        self._drafter, self._network, self._config, self._caches = drafter, network, config, caches
        self._sampled = engine.draft_sampling == "sampled"
        self._block_tokens = engine.block_tokens
        self.taps = drafter.draft.target_layer_ids
        most = engine.max_num_seqs * max(1, engine.num_drafts)
        names = ("token_ids", "kinds", "positions", "row_lo", "row_hi", "slots", "wanted", "no_images")
        self._buffers = {name: Buffer(most, device) for name in names}
        self._buffers |= {name: Buffer(engine.max_num_seqs, device, torch.int32) for name in ("seqused", "start_pos")}
        self._context_slots = Buffer(engine.max_batched_tokens, device)

    @property
    def num_bytes(self) -> int:
        """Of all buffers on the device."""
        return sum(buffer.num_bytes for buffer in (*self._buffers.values(), self._context_slots))

    def keep_context(self, batch: ForwardBatch, streams: dict[int, Tensor]) -> None:
        """Store the context of all rows that the network has just computed. streams: raw, of the layers in `taps`."""
        assert batch.caches is not None, "a running batch has caches"
        places = batch.caches.places
        slots = [self._slots(place, part.start, part.end) for place, part in zip(places, batch.parts, strict=True)]
        where = self._context_slots.fill(np.concatenate(slots))
        rope = BatchRope(self._network.rope_tables(batch.positions.device), batch.positions)
        rows = self._drafter.context_rows(self._drafter.context(streams), rope)
        for cache, new in zip(self._caches.draft_layers, rows, strict=True):
            store_rows(new, cache.window, where, self._config.qk_rope_head_dim)

    def follow(self, followed: Sequence[Followed]) -> None:
        """Nothing: context needs no token behind it, and was kept at once."""

    def propose(self, anchors: Sequence[Anchor]) -> list[Drafts]:
        """Guesses of each anchor, as many as wanted or fewer: they end at a token that ends the text.

        None where the drafter's logits are not finite: no law can be made of them.
        """
        if not anchors:
            return []
        batch = self._batch(anchors)
        base, _ = self._drafter(batch, self._network)
        firsts = [part.first for part in batch.parts]
        sound = [bool(torch.isfinite(base[part.first : part.last]).all()) for part in batch.parts]
        tokens: list[list[int]] = [[] for _ in anchors]
        log_q: list[list[Tensor | None]] = [[] for _ in anchors]
        for slot in range(max(anchor.count for anchor in anchors)):
            active = [i for i, one in enumerate(anchors) if sound[i] and goes_on(one, tokens[i], slot)]
            if not active:
                break
            before = torch.tensor([tokens[i][-1] if slot else anchors[i].row.generated[-1] for i in active])
            rows = torch.tensor([firsts[i] + slot for i in active])
            logits = base[rows.to(base.device)] + self._drafter.markov(before.to(base.device))
            logits = logits.masked_fill(anchors[0].row.forbidden, -torch.inf)
            likeliest = logits.argmax(1).tolist()
            for number, i in enumerate(active):
                token, q = pick(anchors[i].row, logits[number], likeliest[number], slot, sampled=self._sampled)
                tokens[i].append(token)
                log_q[i].append(q)
        return [Drafts(tokens=tuple(t), log_q=tuple(q)) for t, q in zip(tokens, log_q, strict=True)]

    def _batch(self, anchors: Sequence[Anchor]) -> ForwardBatch:
        """A block of slots per anchor; all slots of a block see the same rows, those behind them included."""
        noise, window = self._drafter.draft.noise_token_id, self._config.sliding_window
        parts: list[Part] = []
        for one in anchors:
            first = parts[-1].last if parts else 0
            end = one.position + one.count
            parts.append(Part(start=one.position, end=end, first=first, last=first + one.count))
        counts = [one.count for one in anchors]
        tokens = [slot_tokens(one.row.generated[-1], one.count, noise) for one in anchors]
        row_lo = np.repeat([max(0, part.start - window) for part in parts], counts)
        row_hi = np.repeat([part.end - 1 for part in parts], counts)
        fill = self._buffers_fill
        slots = [self._slots(one.place, part.start, part.end) for one, part in zip(anchors, parts, strict=True)]
        return ForwardBatch(
            token_ids=fill("token_ids", np.concatenate(tokens)),
            kinds=fill("kinds", np.full(sum(counts), TokenKind.TEXT)),
            positions=fill("positions", np.concatenate([np.arange(part.start, part.end) for part in parts])),
            parts=tuple(parts),
            has_images=False,
            image_rows=fill("no_images", np.zeros(0, dtype=np.int64)),
            image_features=None,
            logits_rows=fill("wanted", np.arange(sum(counts))),
            attention=AttentionMetadata(
                row_lo=fill("row_lo", row_lo),
                row_hi=fill("row_hi", row_hi),
                compressed={},
                blocks={0: query_blocks(parts, max(counts), row_lo, row_hi, 0)},
            ),
            caches=BatchCaches(
                layers=self._caches.draft_layers,
                tables={"window": self._caches.tables[DRAFT]},
                places=tuple(one.place for one in anchors),
                window_slots=fill("slots", np.concatenate(slots)),
                seqused=self._buffers["seqused"].fill_whole(counts),
                start_pos=self._buffers["start_pos"].fill_whole([part.start for part in parts]),
            ),
        )

    def _buffers_fill(self, name: str, values: np.ndarray) -> Tensor:
        return self._buffers[name].fill(np.asarray(values))

    def _slots(self, place: int, start: int, end: int) -> np.ndarray:
        return draft_slots(self._caches, self._block_tokens, place, start, end)


def draft_slots(caches: Caches, block_tokens: int, place: int, start: int, end: int) -> np.ndarray:
    """Where the rows of positions [start, end) lie in the caches of the stages."""
    positions = np.arange(start, end)
    table = caches.tables_host(DRAFT)
    return table[place, positions // block_tokens] * block_tokens + positions % block_tokens


def goes_on(anchor: Anchor, tokens: Sequence[int], slot: int) -> bool:
    """Whether a slot is guessed at all. tokens: guessed before it."""
    return slot < anchor.count and (slot == 0 or not anchor.row.ends_at(tokens[-1]))


def pick(row: RunningRow, logits_V: Tensor, likeliest: int, slot: int, *, sampled: bool) -> tuple[int, Tensor | None]:
    """A guess and, if it was drawn, what from. Drawn at the request's temperature without its cuts."""
    if not sampled or row.request.params.temperature == 0:
        return likeliest, None
    step = len(row.generated)
    log_q = (logits_V.double().cpu() / row.request.params.temperature).log_softmax(0)
    return draw(log_q, uniform(row.stream, step + slot, Purpose.DRAFT, step)), log_q
