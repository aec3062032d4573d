"""Requests, caches and an executor without a model, for tests of the control plane.

`FakeExecutor` keeps what a real one would keep, a row per token and family, but each row is a fingerprint of everything
the token may depend on. Before a step it checks that all rows the step may read are the request's own; the next token
is a function of the last fingerprint. So a wrong block anywhere shows up as a wrong row or a different answer. Where it
is asked for guesses, about every fourth is wrong, and the slots of the guesses are overwritten as a drafter does.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import released

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig, parse_model_config
from deepspan.core.media import ImageBlock, ImageSpan, PreparedImage, TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.core.step import Chunk, StepPlan, StepResult
from deepspan.kv.families import DRAFT, Family, cache_families
from deepspan.kv.manager import CacheManager

WINDOW, BLOCK, MAX_SPAN = 8, 16, 24
VOCAB = 250


def small_model() -> ModelConfig:
    """Ratios 4 and 16, a window of 8, spans up to 24 tokens."""
    config = parse_model_config(released.flash_vision())
    assert config.vision is not None
    vision = replace(config.vision, max_n_token=MAX_SPAN)
    ratios = (0, 4, 16)
    return replace(config, sliding_window=WINDOW, compress_ratios=ratios, num_hidden_layers=3, vision=vision)


def small_engine(**changes: int) -> EngineConfig:
    values = {"block_tokens": BLOCK, "max_model_len": 256, "max_num_seqs": 4, "max_batched_tokens": 48}
    return EngineConfig(**{**values, "encoder_rows": 2 * MAX_SPAN, **changes}).checked(small_model())  # type: ignore[arg-type]


def small_families(num_drafts: int = 0) -> tuple[Family, ...]:
    """With the family of draft stages where there are drafts."""
    return cache_families(small_model(), BLOCK, dtype_bytes=2, num_drafts=num_drafts, num_stages=min(1, num_drafts))


def small_cache(num_blocks: int = 40, prefix_caching: bool = True, num_drafts: int = 0) -> CacheManager:
    families = small_families(num_drafts)
    return CacheManager(families, dict.fromkeys((f.name for f in families), num_blocks), prefix_caching)


def image(identity: str, num_rows: int) -> PreparedImage:
    """An image of START, `num_rows` cells in one row, NEWLINE and END; its pixels are nobody's business here."""
    kinds = [TokenKind.START, *[TokenKind.IMAGE] * num_rows, TokenKind.NEWLINE, TokenKind.END]
    block = ImageBlock(kinds=np.asarray(kinds, dtype=np.int8), encoder_rows=np.arange(num_rows, dtype=np.int32))
    return PreparedImage(patches=np.zeros((0, 1)), grid_rows=0, grid_cols=0, block=block, digest=identity)


def request(*parts: Sequence[int] | PreparedImage, max_tokens: int = 4, salt: bytes = b"") -> Request:
    """A prompt of token ids and images in order; images are placed as `engine.inputs` places them."""
    ids: list[int] = []
    kinds: list[int] = []
    spans, images = [], []
    for part in parts:
        if isinstance(part, PreparedImage):
            offset = len(ids)
            block = [TokenKind.PAD] * (3 - offset % 4) + part.block.kinds.tolist()
            first = offset + 3 - offset % 4
            spans.append(ImageSpan(offset=offset, first=first, last=offset + len(block) - 1))
            images.append(part)
            ids += [VOCAB + kind for kind in block]
            kinds += block
        else:
            ids += part
            kinds += [TokenKind.TEXT] * len(part)
    return Request(
        token_ids=np.asarray(ids, dtype=np.int64),
        kinds=np.asarray(kinds, dtype=np.int8),
        spans=tuple(spans),
        images=tuple(images),
        params=SamplingParams(max_tokens=max_tokens),
        cache_salt=salt,
    )


def answer(wanted: Request) -> list[int]:
    """What `FakeExecutor` must answer, computed from the request alone."""
    tokens, out = wanted.token_ids.tolist(), []
    while len(out) < wanted.params.max_tokens:
        out.append(_next_token(_fingerprints(wanted, tokens)[-1]))
        tokens.append(out[-1])
    return out


class FakeExecutor:
    """Keeps rows, checks what a step may read, and answers by fingerprint. failing: requests whose steps fail."""

    def __init__(self, families: Sequence[Family], failing: frozenset[int] = frozenset()) -> None:
        self._families, self._failing = families, failing
        self._rows: dict[tuple[str, int, int], bytes] = {}
        self._tables: dict[tuple[int, str], list[int]] = {}
        self._running: dict[int, tuple[Request, list[int]]] = {}
        self.encoded: list[str] = []
        self._kept: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self._kept -= set(plan.dropped)
        for job in plan.encoder_jobs:
            self.encoded.append(job.image.digest)
            self._kept.add(job.image.digest)
        tokens, failed, accepted, drafts = {}, {}, {}, {}
        for chunk in plan.chunks:
            if chunk.begins is not None:
                known = [*chunk.begins.request.token_ids.tolist(), *chunk.begins.generated]
                self._running[chunk.row] = chunk.begins.request, known
            wanted, known = self._running[chunk.row]
            guesses = list(chunk.token_ids)[len(chunk.token_ids) - chunk.num_drafts :]
            assert list(chunk.token_ids) == [*known, *guesses][chunk.start : chunk.end]
            self._check_images(wanted, chunk.start, chunk.end)
            prints = _fingerprints(wanted, [*known, *guesses][: chunk.end])
            for family in self._families:
                table = self._tables.setdefault((chunk.row, family.name), [])
                if chunk.begins is not None:
                    table.clear()
                if family.name in chunk.blocks:
                    new = chunk.blocks[family.name]
                    table[new.first :] = new.blocks
                self._check_and_write(family, table, chunk.start, chunk.end, prints)
            if chunk.request_id in self._failing:
                failed[chunk.request_id] = "told to fail"
                continue
            if chunk.samples:
                assert chunk.end == len(known) + len(guesses)
                new = _judged(guesses, prints[len(known) - 1 :])
                tokens[chunk.request_id], accepted[chunk.request_id] = new, len(new) - 1
                known += new
            if chunk.wanted_drafts:
                drafts[chunk.request_id] = self._guess(chunk, wanted, known)
        return StepResult(tokens=tokens, failed=failed, accepted=accepted, drafts=drafts)

    def _guess(self, chunk: Chunk, wanted: Request, known: Sequence[int]) -> list[int]:
        """Guesses behind the newest token, whose own row and those behind it are the slots."""
        family = next(family for family in self._families if family.name == DRAFT)
        table, size, newest = self._tables[chunk.row, DRAFT], family.block_tokens, len(known) - 1
        prints = _fingerprints(wanted, known)
        for position in range(max(0, newest - WINDOW), newest):
            there = self._rows.get((DRAFT, table[position // size], position % size))
            assert there == prints[position], f"draft context of token {position} is not its own"
        guesses: list[int] = []
        for slot in range(chunk.wanted_drafts):
            assert table[(newest + slot) // size] != 0, f"slot {newest + slot} has no block"
            self._rows[DRAFT, table[(newest + slot) // size], (newest + slot) % size] = b"slot"
            fingerprint = _fingerprints(wanted, [*known, *guesses])[-1]
            guesses.append(_next_token(fingerprint) if fingerprint[4] % 4 else 1)
        return guesses

    def _check_images(self, wanted: Request, start: int, end: int) -> None:
        for span, one in zip(wanted.spans, wanted.images, strict=True):
            assert not any(span.offset < edge <= span.last for edge in (start, end)), "cut image"
            if start <= span.offset < end:
                assert one.digest in self._kept, "an image without its rows"

    def _check_and_write(self, family: Family, table: list[int], start: int, end: int, prints: list[bytes]) -> None:
        size = family.block_tokens
        kept = family.block_rows if family.kind == "state" else size
        for position in range(_first_read(family.name, start), start):
            there = self._rows.get((family.name, table[position // size], position % size % kept))
            assert there == prints[position], f"{family.name}: row of token {position} is not its own"
        for position in range(start, end):
            assert table[position // size] != 0, f"{family.name}: token {position} has no block"
            self._rows[family.name, table[position // size], position % size % kept] = prints[position]


def _first_read(family: str, start: int) -> int:
    """Lowest token that the rows from `start` on read, said once more from the model's definition."""
    lowest = {
        "window": start - WINDOW + 1,
        DRAFT: start,  # read when guessing alone
        "state_4": (start // 4 - 1) * 4,  # the last group's second half goes into the next entry
        "state_16": start // 16 * 16,
    }
    return max(0, lowest.get(family, 0))


def _judged(guesses: Sequence[int], prints: Sequence[bytes]) -> list[int]:
    """Guesses up to the first wrong one, and the right token behind them. prints: of the token before each."""
    new: list[int] = []
    for index, fingerprint in enumerate(prints):
        new.append(_next_token(fingerprint))
        if index == len(guesses) or guesses[index] != new[-1]:
            break
    return new


def _fingerprints(wanted: Request, tokens: Sequence[int]) -> list[bytes]:
    """Of each token: a digest of all tokens before it and in its image, and of the images."""
    prints = []
    digest = hashlib.sha256(wanted.cache_salt)
    owner = {
        position: index for index, span in enumerate(wanted.spans) for position in range(span.offset, span.last + 1)
    }
    for position, token in enumerate(tokens):
        digest.update(f"{token},".encode())
        if position in owner:
            digest.update(wanted.images[owner[position]].digest.encode())
        prints.append(digest.digest())
    return prints


def _next_token(fingerprint: bytes) -> int:
    return 2 + int.from_bytes(fingerprint[:4], "little") % (VOCAB - 2)  # never the end of sequence
