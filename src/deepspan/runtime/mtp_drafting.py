"""Runs plain MTP beside the network: its rows follow the network's, and its guesses come one behind the other.

Owns the indices of its cache. A row joins the network's streams with the token that comes next, so rows are computed
when that token is known: the next one of the prompt, or what the step has chosen. Invariants: a row exists for every
token that counts as computed, whether anybody drafts or not, and never for a draft that was not taken; rows of guesses
lie where their tokens would stand and are overwritten; what one request is guessed never depends on the others.
Called by `runtime.runner`.
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
from deepspan.model.drafter import DSpark
from deepspan.model.mtp import Mtp
from deepspan.model.network import DeepseekV4
from deepspan.runtime.batch_builder import QUERY_BLOCK, query_blocks
from deepspan.runtime.buffers import Buffer
from deepspan.runtime.caches import Caches
from deepspan.runtime.choosing import Drafts
from deepspan.runtime.drafting import Anchor, Drafting, Followed, draft_slots, goes_on, pick


def drafting_for(
    drafter: DSpark | Mtp,
    network: DeepseekV4,
    config: ModelConfig,
    engine: EngineConfig,
    caches: Caches,
    device: torch.device,
) -> "AnyDrafting":
    """What runs this kind of draft stages."""
    if isinstance(drafter, Mtp):
        return MtpDrafting(drafter, network, config, engine, caches, device)
    return Drafting(drafter, network, config, engine, caches, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of one request: positions from `start` on, the tokens behind them and their kinds.

    features: encoder rows of the IMAGE tokens among them.
    """

    place: int
    start: int
    token_ids: np.ndarray
    kinds: np.ndarray
    features: Tensor | None = None


class MtpDrafting:
    """The stage with its cache."""

    def __init__(
        self,
        drafter: Mtp,
        network: DeepseekV4,
        config: ModelConfig,
        engine: EngineConfig,
        caches: Caches,
        device: torch.device,
    ) -> None:
        self._drafter, self._network, self._config, self._caches = drafter, network, config, caches
        self._sampled = engine.draft_sampling == "sampled"
        self._block_tokens = engine.block_tokens
        self.taps = (config.num_hidden_layers - 1,)
        names = ("token_ids", "kinds", "positions", "row_lo", "row_hi", "slots", "image_rows", "wanted")
        self._buffers = {name: Buffer(engine.max_batched_tokens, device) for name in names}
        self._buffers |= {name: Buffer(engine.max_num_seqs, device, torch.int32) for name in ("seqused", "start_pos")}
        self._streams: dict[int, Tensor] = {}  # of the network, by place, until their tokens are known
        self._newest: dict[int, Tensor] = {}  # of the stage, by place: its streams [n, D] at the last row

    @property
    def num_bytes(self) -> int:
        """Of all buffers on the device."""
        return sum(buffer.device.nbytes for buffer in self._buffers.values())

    def keep_context(self, batch: ForwardBatch, streams: dict[int, Tensor]) -> None:
        """Remember what the network made of each part until `follow`. streams: raw, of the layers in `taps`."""
        assert batch.caches is not None, "a running batch has caches"
        for place, part in zip(batch.caches.places, batch.parts, strict=True):
            self._streams[place] = streams[self.taps[0]][part.first : part.last]

    def follow(self, followed: Sequence[Followed]) -> None:
        """Compute the rows of all tokens that are computed and final, now that the tokens behind them are known."""
        if not followed:
            return
        rows = [_rows_of(one) for one in followed]
        streams = torch.cat([self._streams[one.place][: len(one.token_ids)] for one in rows])
        out = self._drafter(self._batch(rows), streams, self._network)
        last = -1
        for one in rows:
            last += len(one.token_ids)
            self._newest[one.place] = out[last].clone()  # a view would keep the whole step

    def propose(self, anchors: Sequence[Anchor]) -> list[Drafts]:
        """Guesses of each anchor, as many as wanted or fewer: they end at a token that ends the text.

        None where the logits are no numbers. Called at the end of every step, whether anybody drafts or not.
        """
        self._streams.clear()
        tokens: list[list[int]] = [[] for _ in anchors]
        log_q: list[list[Tensor | None]] = [[] for _ in anchors]
        active = list(range(len(anchors)))
        slot = 0
        streams = torch.stack([self._newest[one.place] for one in anchors]) if anchors else None
        while active and streams is not None:
            logits = self._drafter.logits(streams, self._network)
            sound = (~torch.isnan(logits).any(1)).tolist()
            logits = logits.masked_fill(anchors[0].row.forbidden, -torch.inf)
            likeliest = logits.argmax(1).tolist()
            kept: list[int] = []
            for number, i in enumerate(active):
                if not sound[number]:
                    continue
                token, q = pick(anchors[i].row, logits[number], likeliest[number], slot, sampled=self._sampled)
                tokens[i].append(token)
                log_q[i].append(q)
                if goes_on(anchors[i], tokens[i], slot + 1):
                    kept.append(number)
            streams = streams[kept]
            active = [active[number] for number in kept]
            if active:
                streams = self._drafter(self._guessed(anchors, active, tokens, slot), streams, self._network)
            slot += 1
        return [Drafts(tokens=tuple(t), log_q=tuple(q)) for t, q in zip(tokens, log_q, strict=True)]

    def _guessed(
        self, anchors: Sequence[Anchor], active: Sequence[int], tokens: Sequence[Sequence[int]], slot: int
    ) -> ForwardBatch:
        """A row for each that goes on: at the position before its newest guess."""
        text = np.full(1, TokenKind.TEXT, dtype=np.int8)
        rows = [
            _Rows(
                place=anchors[i].place,
                start=anchors[i].position + slot,
                token_ids=np.asarray(tokens[i][-1:], dtype=np.int64),
                kinds=text,
            )
            for i in active
        ]
        return self._batch(rows)

    def _batch(self, rows: Sequence[_Rows]) -> ForwardBatch:
        """Rows of several requests; each sees the rows of its own before it, as far as the window reaches."""
        parts: list[Part] = []
        for one in rows:
            first, count = parts[-1].last if parts else 0, len(one.token_ids)
            parts.append(Part(start=one.start, end=one.start + count, first=first, last=first + count))
        positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
        row_lo = np.maximum(positions - self._config.sliding_window + 1, 0)
        kinds = np.concatenate([one.kinds for one in rows])
        images = np.flatnonzero(kinds == TokenKind.IMAGE)
        features = [one.features for one in rows if one.features is not None]
        slots = [
            draft_slots(self._caches, self._block_tokens, one.place, part.start, part.end)
            for one, part in zip(rows, parts, strict=True)
        ]
        fill = self._fill
        return ForwardBatch(
            token_ids=fill("token_ids", np.concatenate([one.token_ids for one in rows])),
            kinds=fill("kinds", kinds),
            positions=fill("positions", positions),
            parts=tuple(parts),
            has_images=bool((kinds != TokenKind.TEXT).any()),
            image_rows=fill("image_rows", images),
            image_features=torch.cat(features) if features else None,
            logits_rows=fill("wanted", np.zeros(0, dtype=np.int64)),
            attention=AttentionMetadata(
                row_lo=fill("row_lo", row_lo),
                row_hi=fill("row_hi", positions),
                compressed={},
                blocks={0: query_blocks(parts, QUERY_BLOCK, row_lo, positions, 0)},
            ),
            caches=BatchCaches(
                layers=self._caches.draft_layers,
                tables={"window": self._caches.tables[DRAFT]},
                places=tuple(one.place for one in rows),
                window_slots=fill("slots", np.concatenate(slots)),
                seqused=self._buffers["seqused"].fill_whole([part.end - part.start for part in parts]),
                start_pos=self._buffers["start_pos"].fill_whole([part.start for part in parts]),
            ),
        )

    def _fill(self, name: str, values: np.ndarray) -> Tensor:
        return self._buffers[name].fill(values)


def _rows_of(one: Followed) -> _Rows:
    """The tokens behind a request's rows: of the prompt as far as it goes, then of what was generated."""
    request, prompt = one.row.request, len(one.row.request.token_ids)
    first, last = one.start + 1, one.end + 1
    generated = np.asarray(one.row.generated[max(0, first - prompt) : max(0, last - prompt)], dtype=np.int64)
    token_ids = np.concatenate((request.token_ids[first:last], generated))
    kinds = np.concatenate((request.kinds[first:last], np.full(len(generated), TokenKind.TEXT, dtype=np.int8)))
    assert len(token_ids) == one.end - one.start, "the token behind a row is known when the row is followed"
    return _Rows(place=one.place, start=one.start, token_ids=token_ids, kinds=kinds, features=one.features)


AnyDrafting = Drafting | MtpDrafting
