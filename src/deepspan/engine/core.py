"""The step loop: requests in, token events out.

Joins scheduler, executor and output collectors; knows neither tensors nor threads. Invariants: every request that was
added has exactly one terminal event; a request that ends for any reason leaves nothing behind in any of the three.
Called by `llm` directly and by `engine.background` from its thread.
"""

import logging
from dataclasses import dataclass, replace
from secrets import randbits
from time import perf_counter
from typing import Protocol

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.core.step import Chunk, StepPlan, StepResult
from deepspan.engine.outputs import OutputCollector
from deepspan.sched.draft_depth import DraftDepth
from deepspan.sched.scheduler import Scheduler
from deepspan.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs steps: a runner in this process, or a stand-in for tests and benchmarks."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and what is going on now. Tokens of prompts count when they are computed.

    cache_usage: share of cache blocks in use, 0 to 1. num_drafts: of requests and steps, those with drafts to judge;
    num_draft_tokens, num_accepted_tokens: drafts judged, without those that a grammar does not allow, and taken;
    accepted_per_position: how often the first, the second and so on was.
    """

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    cache_usage: float
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()


class EngineCore:
    """One engine. Not thread-safe."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, tokenizer: Tokenizer, depth: DraftDepth | None = None
    ) -> None:
        """depth: how many tokens to guess; None for none."""
        self._scheduler, self._executor, self._tokenizer = scheduler, executor, tokenizer
        self._depth = depth or DraftDepth(0, is_fixed=True)
        self._collectors: dict[int, OutputCollector] = {}
        self._pending: list[TokenEvent] = []  # of requests that ended while a step was interrupted
        self._next_id = 0
        self._counts = {"steps": 0, "prompt": 0, "cached": 0, "generated": 0, "drafts": 0, "drafted": 0, "accepted": 0}
        self._accepted_per_position = [0] * self._depth.num_drafts

    def add(self, request: Request, *, priority: int = 0) -> list[int]:
        """Queue a request; one id for each of its choices. Choices share the prompt's cache.

        Raises InputError if it could never be served; then nothing was queued.
        """
        params = request.params
        # How deep the automatic mode drafts depends on the clock, and what is drawn depends on what was drafted.
        is_drafted = self._depth.is_fixed or params.temperature == 0 or params.seed is None
        if params.seed is None:
            params = replace(params, seed=randbits(64))
        first = self._next_id
        for choice in range(params.n):
            one = replace(request, params=params, choice=choice)
            after = first if choice else None
            self._scheduler.add(first + choice, one, priority=priority, after=after, is_drafted=is_drafted)
            self._collectors[first + choice] = OutputCollector(first + choice, one, self._tokenizer)
            self._next_id += 1
        return list(range(first, self._next_id))

    @property
    def has_work(self) -> bool:
        return bool(self._collectors)

    def step(self) -> list[TokenEvent]:
        """Run one step; the events of all requests that it moved.

        If the executor itself breaks, nobody knows what its caches hold: every request ends with the error.
        """
        if self._pending:
            events, self._pending = self._pending, []
            return events
        wanted = self._depth.choose(self._scheduler.num_running)
        plan = self._scheduler.plan(wanted)
        if plan is None:
            return []
        started = perf_counter()
        try:
            result = self._executor.run(plan)
        except Exception as error:
            log.exception("a step failed; every request ends")
            return self.fail_all(f"{type(error).__name__}: {error}")
        except BaseException:
            self._pending = self.fail_all("a step was interrupted")
            raise
        self._count(plan, result, wanted, perf_counter() - started)
        events: list[TokenEvent] = []
        finished: list[int] = []
        for chunk in plan.chunks:
            collector = self._collectors[chunk.request_id]
            collector.num_cached_tokens = self._scheduler.sequence(chunk.request_id).num_cached or 0
            if chunk.request_id in result.prompt_logprobs:
                collector.push_prompt(result.prompt_logprobs[chunk.request_id])
            if chunk.request_id in result.failed:
                events.append(collector.end("error", result.failed[chunk.request_id]))
            elif chunk.samples:
                events += _pushed(collector, result, chunk.request_id)
            if collector.is_finished:
                finished.append(chunk.request_id)
        self._scheduler.commit(plan, result, finished)
        return events

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request now; its terminal event, or nothing if it has ended already."""
        collector = self._collectors.get(request_id)
        if collector is None or collector.is_finished:
            return []
        self._scheduler.abort(request_id)
        return [collector.end("abort")]

    def fail_all(self, reason: str) -> list[TokenEvent]:
        """End every request: the executor is broken. Terminal events of all that had none."""
        events = []
        for request_id, collector in self._collectors.items():
            if not collector.is_finished:
                self._scheduler.abort(request_id)
                events.append(collector.end("error", reason))
        return events

    def take(self, request_id: int) -> RequestOutput:
        """The output of a finished request, which the engine then forgets. Raises KeyError for an unknown one."""
        output = self._collectors[request_id].output()
        del self._collectors[request_id]
        return output

    def is_finished(self, request_id: int) -> bool:
        """Whether a request has had its terminal event. Raises KeyError for one that was taken."""
        return self._collectors[request_id].is_finished

    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self._counts["steps"],
            num_prompt_tokens=self._counts["prompt"],
            num_cached_tokens=self._counts["cached"],
            num_generated_tokens=self._counts["generated"],
            num_preemptions=self._scheduler.num_preemptions,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            cache_usage=self._scheduler.cache_usage,
            num_drafts=self._counts["drafts"],
            num_draft_tokens=self._counts["drafted"],
            num_accepted_tokens=self._counts["accepted"],
            accepted_per_position=tuple(self._accepted_per_position),
        )

    def check(self) -> None:
        """Prove that nothing is leaked. Between steps only."""
        self._scheduler.check()

    def _count(self, plan: StepPlan, result: StepResult, wanted_drafts: int, seconds: float) -> None:
        counts = self._counts
        counts["steps"] += 1
        counts["generated"] += sum(len(tokens) for tokens in result.tokens.values())
        decodes = [chunk for chunk in plan.chunks if _is_decode(chunk)]
        for chunk in plan.chunks:
            counts["prompt"] += 0 if _is_decode(chunk) else chunk.end - chunk.start
            counts["cached"] += chunk.start if chunk.begins is not None else 0
            if chunk.num_drafts and chunk.request_id in result.accepted:
                accepted = result.accepted[chunk.request_id]
                counts["drafts"] += 1
                counts["drafted"] += chunk.num_drafts - result.invalid.get(chunk.request_id, 0)
                counts["accepted"] += accepted
                for position in range(accepted):
                    self._accepted_per_position[position] += 1
        if len(decodes) == len(plan.chunks) and not result.failed and not plan.encoder_jobs:
            drafted = [chunk.num_drafts for chunk in decodes]
            accepted_each = [result.accepted.get(chunk.request_id, 0) for chunk in decodes]
            self._depth.observe(len(decodes), wanted_drafts, seconds, drafted, accepted_each)


def _is_decode(chunk: Chunk) -> bool:
    """Whether a chunk computes the newest token, and drafts behind it."""
    return chunk.begins is None and chunk.samples and len(chunk.token_ids) == 1 + chunk.num_drafts


def _pushed(collector: OutputCollector, result: StepResult, request_id: int) -> list[TokenEvent]:
    """Events of a request's new tokens, up to the one that ends it: what stands behind an end is nobody's."""
    events: list[TokenEvent] = []
    tokens = result.tokens[request_id]
    logprobs = result.logprobs.get(request_id, [None] * len(tokens))
    for token, about in zip(tokens, logprobs, strict=True):
        events.append(collector.push(token, about))
        if collector.is_finished:
            break
    return events
