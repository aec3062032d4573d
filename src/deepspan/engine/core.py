"""The step loop: requests in, token events out.

Joins scheduler, executor and output collectors; knows neither tensors nor threads. Invariants: every request that was
added has exactly one terminal event; a request that ends for any reason leaves nothing behind in any of the three.
Called by `llm` directly and by `engine.background` from its thread.
"""

import logging
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Protocol

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.core.step import StepPlan, StepResult
from deepspan.engine.outputs import OutputCollector
from deepspan.sched.scheduler import Scheduler
from deepspan.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs steps: a runner in this process, or a stand-in for tests and benchmarks."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and what is going on now. Tokens of prompts count when they are computed.

    cache_usage: share of cache blocks in use, 0 to 1.
    """

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    cache_usage: float


class EngineCore:
    """One engine. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, executor: Executor, tokenizer: Tokenizer) -> None:
        self._scheduler, self._executor, self._tokenizer = scheduler, executor, tokenizer
        self._collectors: dict[int, OutputCollector] = {}
        self._pending: list[TokenEvent] = []  # of requests that ended while a step was interrupted
        self._next_id = 0
        self._counts = {"steps": 0, "prompt": 0, "cached": 0, "generated": 0}

    def add(self, request: Request, *, priority: int = 0) -> list[int]:
        """Queue a request; one id for each of its choices. Choices share the prompt's cache.

        Raises InputError if it could never be served; then nothing was queued.
        """
        params = request.params
        if params.seed is None:
            params = replace(params, seed=randbits(64))
        first = self._next_id
        for choice in range(params.n):
            one = replace(request, params=params, choice=choice)
            self._scheduler.add(first + choice, one, priority=priority, after=first if choice else None)
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
        plan = self._scheduler.plan()
        if plan is None:
            return []
        try:
            result = self._executor.run(plan)
        except Exception as error:
            log.exception("a step failed; every request ends")
            return self.fail_all(f"{type(error).__name__}: {error}")
        except BaseException:
            self._pending = self.fail_all("a step was interrupted")
            raise
        self._count(plan, result)
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
                token, about = result.tokens[chunk.request_id], result.logprobs.get(chunk.request_id)
                events.append(collector.push(token, about))
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
        )

    def check(self) -> None:
        """Prove that nothing is leaked. Between steps only."""
        self._scheduler.check()

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        counts = self._counts
        counts["steps"] += 1
        counts["generated"] += len(result.tokens)
        for chunk in plan.chunks:
            is_decode = chunk.begins is None and chunk.samples and len(chunk.token_ids) == 1
            counts["prompt"] += 0 if is_decode else chunk.end - chunk.start
            counts["cached"] += chunk.start if chunk.begins is not None else 0
