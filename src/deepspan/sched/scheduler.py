"""The scheduler: `plan` says what the next step computes, `commit` takes in what came of it.

Invariants: no chunk cuts an image; a step never exceeds its budget; decodes are served before prompts, and a request is
never overtaken by a later one of the same priority in the queue; a request that was admitted can always run alone, so
preempting the last ones lets the first one go on. A request ends in `commit` or `abort`, once.

Called by the engine's step loop, which also decides when a text is at its end.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from deepspan.config.engine import EngineConfig
from deepspan.core.request import Request
from deepspan.core.step import Begin, Chunk, EncoderJob, NewBlocks, StepPlan, StepResult
from deepspan.errors import InputError
from deepspan.kv.capacity import in_flight_tokens, request_blocks, reserved_tokens
from deepspan.kv.encoder_cache import EncoderCache
from deepspan.kv.keys import KeyChain
from deepspan.kv.manager import CacheManager
from deepspan.sched.sequence import Sequence


@dataclass(slots=True)
class _Step:
    """A plan in the making. prompt_budget: tokens left for what is no decode. wanted_drafts: of each that samples."""

    prompt_budget: int
    wanted_drafts: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    jobs: list[EncoderJob] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class Scheduler:
    """Queues of one engine."""

    def __init__(self, engine: EngineConfig, cache: CacheManager) -> None:
        """engine: checked against the model."""
        self._engine, self._cache = engine, cache
        self._encoder = EncoderCache(engine.encoder_rows)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(range(engine.max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def cache_usage(self) -> float:
        """Share of cache blocks in use, 0 to 1."""
        return self._cache.usage

    def sequence(self, request_id: int) -> Sequence:
        """Progress of a request that has not ended. Raises KeyError."""
        return self._sequences[request_id]

    def add(
        self,
        request_id: int,
        request: Request,
        *,
        priority: int = 0,
        after: int | None = None,
        is_drafted: bool = True,
    ) -> None:
        """Queue a request. priority: lower is served first. after: request whose prompt this one shares.

        is_drafted: whether its next tokens may be guessed.

        Raises InputError with the numbers if it could not be served even alone.
        """
        assert request_id not in self._sequences, f"request {request_id} is known"
        self._check_fits(request)
        tokens = request.token_ids.tolist()
        sequence = Sequence(
            request_id=request_id,
            request=request,
            order=(priority, self._num_arrived),
            token_ids=tokens,
            after=after,
            is_drafted=is_drafted,
        )
        self._num_arrived += 1
        chain = KeyChain(tokens, request.spans, request.images, self._cache.block_tokens, request.cache_salt)
        self._cache.open(request_id, tokens, request.spans, chain)
        self._sequences[request_id] = sequence
        self._queue(sequence)

    def plan(self, wanted_drafts: int = 0) -> StepPlan | None:
        """What the next step computes; None if there is nothing to do.

        wanted_drafts: tokens to guess behind those that the step chooses, at most `num_drafts` of the engine.
        """
        assert wanted_drafts <= self._engine.num_drafts, "room is reserved for num_drafts"
        decodes = sum(sequence.is_decoding for sequence in self._running)
        step = _Step(self._engine.max_batched_tokens - decodes * (1 + self._engine.num_drafts), wanted_drafts)
        for sequence in sorted(self._running, key=lambda one: one.order):
            if sequence.row is not None:  # not preempted by one before it
                self._continue(sequence, step)
        if not step.preempted:
            self._admit(step)
        if not step.chunks:
            assert not self._running, "running requests must go on"
            return None
        return StepPlan(
            chunks=tuple(step.chunks),
            encoder_jobs=tuple(step.jobs),
            dropped=self._encoder.take_dropped(),
            preempted=tuple(step.preempted),
        )

    def commit(self, plan: StepPlan, result: StepResult, finished: Collection[int] = ()) -> None:
        """Take in a step. finished: requests that have what they need. Those that failed end here too."""
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.request_id)
            if sequence is None:  # aborted while the step ran
                continue
            if chunk.request_id in result.failed:
                # Its images may be what failed: whoever comes next has them encoded anew.
                for digest in sequence.held:
                    self._encoder.forget(digest)
                self._end(sequence)
                continue
            sequence.num_computed = chunk.end
            if chunk.samples:
                tokens = result.tokens[chunk.request_id]
                # Rows of drafts that were not taken count as never computed: they will be overwritten.
                sequence.num_computed += len(tokens) - 1 - chunk.num_drafts
                sequence.token_ids += tokens
            if chunk.samples or chunk.wanted_drafts:
                sequence.drafts = tuple(result.drafts.get(chunk.request_id, ()))
                sequence.redrafts = False
            self._cache.commit(chunk.request_id, sequence.num_computed)
            self._drop_images(sequence)
            if chunk.request_id in finished:
                self._end(sequence)

    def abort(self, request_id: int) -> bool:
        """End a request, wherever it is; False if it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def check(self) -> None:
        """Prove that nothing is leaked. Between steps only."""
        self._cache.check()
        self._encoder.check(set(self._sequences))
        rows = sorted([*self._free_rows, *(one.row for one in self._running if one.row is not None)])
        assert rows == list(range(self._engine.max_num_seqs)), "rows are leaked or shared"
        assert len(self._waiting) + len(self._running) == len(self._sequences), "a request is lost"

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.row is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._free_rows.append(sequence.row)
        self._drop_all_images(sequence)
        self._cache.close(sequence.request_id)

    def _check_fits(self, request: Request) -> None:
        length = len(request.token_ids) + request.params.max_tokens
        if length > self._engine.max_model_len:
            raise InputError(
                f"{len(request.token_ids)} prompt tokens and max_tokens {request.params.max_tokens} are more than "
                f"max_model_len {self._engine.max_model_len}"
            )
        for family in self._cache.families:
            reserved = reserved_tokens(length, self._engine)
            needed = request_blocks(family, reserved, in_flight_tokens(self._engine))
            there = self._cache.pools[family.name].num_blocks
            if needed > there:
                raise InputError(f"the request needs {needed} blocks of the {family.name} cache, which has {there}")
        for span, image in zip(request.spans, request.images, strict=True):
            size = span.last + 1 - span.offset
            if size > self._engine.max_batched_tokens - self._engine.max_num_seqs * (1 + self._engine.num_drafts):
                raise InputError(f"an image of {size} tokens does not fit a step of {self._engine.max_batched_tokens}")
            if len(image.block.encoder_rows) > self._encoder.capacity:
                raise InputError(f"an image of {len(image.block.encoder_rows)} rows is over {self._encoder.capacity}")

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        """Schedule a running request, preempting later ones for its blocks if that is what it takes."""
        end = self._chunk_end(sequence, sequence.num_computed, step)
        if end == sequence.num_computed:
            return
        while (blocks := self._cache.extend(sequence.request_id, end + self._engine.num_drafts)) is None:
            victim = max(self._running, key=lambda one: one.order)
            self._preempt(victim, step)
            if victim is sequence:
                return
        self._schedule(sequence, sequence.num_computed, end, step, blocks)

    def _admit(self, step: _Step) -> None:
        """Start waiting requests in order, up to the first that cannot start now."""
        for sequence in list(self._waiting):
            if not self._free_rows:
                return
            if self._is_held_back(sequence):
                continue
            # The logits of a prompt's tokens come from computing them.
            scored = sequence.request.params.prompt_logprobs is not None
            prefix = 0 if scored else self._cache.find_prefix(sequence.request_id, sequence.num_wanted)
            end = self._chunk_end(sequence, prefix, step)
            blocks = None
            if end > prefix:
                # Room for the whole prompt, and for one more block of each that runs: starting without it would only
                # push somebody out again before long.
                room = len(sequence.token_ids) + len(self._running) * self._cache.block_tokens
                blocks = self._cache.admit(sequence.request_id, prefix, end + self._engine.num_drafts, room)
            if blocks is None:
                self._drop_all_images(sequence)
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.row, sequence.num_computed = self._free_rows.pop(), prefix
            if sequence.num_cached is None:
                sequence.num_cached = prefix
            generated = sequence.token_ids[sequence.num_prompt_tokens :]
            begins = Begin(request=sequence.request, generated=generated)
            self._schedule(sequence, prefix, end, step, blocks, begins)

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Whether the request whose prompt this one shares has still to compute it."""
        leader = self._sequences.get(sequence.after) if sequence.after is not None else None
        return leader is not None and leader.num_computed < leader.num_prompt_tokens

    def _chunk_end(self, sequence: Sequence, start: int, step: _Step) -> int:
        """End of a chunk within the budgets of tokens and of encoder rows."""
        if sequence.is_decoding:
            return start + 1 + len(sequence.usable_drafts)
        soft = self._engine.chunk_tokens or step.prompt_budget
        if step.prompt_budget <= 0:
            return start
        end = sequence.chunk_end(start, step.prompt_budget, soft)
        for number in sequence.images_in(start, end):
            if not self._hold_image(sequence, number, step):
                return sequence.request.spans[number].offset
        return end

    def _hold_image(self, sequence: Sequence, number: int, step: _Step) -> bool:
        """Have an image encoded in this step unless it is there; False if there is no room for it now."""
        image = sequence.request.images[number]
        if image.digest in self._encoder:
            self._encoder.hold(image.digest, sequence.request_id)
        elif self._encoder.reserve(image.digest, len(image.block.encoder_rows), sequence.request_id):
            step.jobs.append(EncoderJob(request_id=sequence.request_id, image=image))
        else:
            return False
        sequence.held.add(image.digest)
        return True

    def _schedule(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        step: _Step,
        blocks: dict[str, NewBlocks],
        begins: Begin | None = None,
    ) -> None:
        assert sequence.row is not None, "only running requests are scheduled"
        drafts = sequence.usable_drafts if sequence.is_decoding else ()
        if not sequence.is_decoding:
            step.prompt_budget -= end - start
        samples = end - len(drafts) == len(sequence.token_ids)
        guesses = samples or (sequence.redrafts and end == sequence.num_wanted)
        step.chunks.append(
            Chunk(
                request_id=sequence.request_id,
                row=sequence.row,
                start=start,
                end=end,
                token_ids=[*sequence.token_ids[start:end], *drafts],
                samples=samples,
                num_drafts=len(drafts),
                wanted_drafts=step.wanted_drafts if guesses and sequence.is_drafted else 0,
                blocks=blocks,
                begins=begins,
            )
        )

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Back to the queue; what it computed is computed again, unless its blocks can still be found."""
        assert sequence.row is not None, "only running requests are preempted"
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._cache.release(sequence.request_id)
        self._drop_all_images(sequence)
        # What is drawn for a token depends on its draft: with the same drafts, the text stays the same.
        sequence.redrafts |= bool(sequence.drafts)
        sequence.row, sequence.num_computed, sequence.drafts = None, 0, ()
        self._queue(sequence)
        step.preempted.append(sequence.request_id)
        self.num_preemptions += 1

    def _drop_images(self, sequence: Sequence) -> None:
        """Let go of images that are computed whole."""
        if not sequence.held:
            return
        ahead = range(len(sequence.request.spans))
        needed = {
            sequence.request.images[i].digest for i in ahead if sequence.request.spans[i].last >= sequence.num_computed
        }
        for digest in sequence.held - needed:
            self._encoder.drop(digest, sequence.request_id)
        sequence.held &= needed

    def _drop_all_images(self, sequence: Sequence) -> None:
        for digest in sequence.held:
            self._encoder.drop(digest, sequence.request_id)
        sequence.held.clear()

    def _queue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda one: one.order)
