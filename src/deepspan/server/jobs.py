"""One API request being served: prepared in worker threads, run by the engine, watched by the metrics.

Owns what all forms of the API share: fields -> requests -> streams of events. Invariants: a job that is left for any
reason aborts what it started; every answer that ends is counted once. Called by the endpoints of `server`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from deepspan.async_llm import AsyncLLM, merged, outputs_of
from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.engine.background import Stream
from deepspan.server.errors import ApiError
from deepspan.server.fields import ChatFields, CompletionFields, SamplingFields
from deepspan.server.media import MediaLoader
from deepspan.server.metrics import Metrics
from deepspan.server.params import COMPLETION_TOKENS, SamplingDefaults, grammar_of, sampling_params
from deepspan.text.chat import encode_chat
from deepspan.text.segments import ImageSlot, Segment
from deepspan.text.special import FIM_BEGIN, FIM_END, FIM_HOLE
from deepspan.text.switches import ChatOptions, Effort, options_of_request

DEFAULT_PRIORITY = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server answers. Times are seconds.

    names: of the served model; the first is the one that is listed first. request_timeout: None for no limit.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    keep_alive: float = 15.0
    default_effort: Effort = "high"
    strict: bool = False
    guard_metrics: bool = False


@dataclass(slots=True, kw_only=True)
class Job:
    """What one API request became. include_reasoning: whether the client gets to see it."""

    requests: Sequence[Request]
    priority: int
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    streams: list[Stream] = field(default_factory=list)

    def close(self) -> None:
        """Abort what has not ended."""
        for stream in self.streams:
            stream.close()

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of all choices, once they have ended."""
        return outputs_of(self.streams)


class Service:
    """A model and how it is served."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServerSettings,
        media: MediaLoader,
        defaults: SamplingDefaults,
    ) -> None:
        self.llm, self.settings, self.media, self.defaults = llm, settings, media, defaults
        self.metrics = Metrics(settings.names[0], llm)
        self.num_active = 0
        self.draining = False

    def check_model(self, name: str | None) -> str:
        """The name that answers carry. Raises ApiError for a model that is not served here."""
        if name is not None and name not in self.settings.names:
            raise ApiError(status=404, message=f"the model {name[:100]!r} does not exist", param="model")
        return name or self.settings.names[0]

    def options(self, fields: Mapping[str, Any]) -> ChatOptions:
        return options_of_request(fields, default_effort=self.settings.default_effort)

    async def chat_job(self, fields: ChatFields) -> Job:
        """Prepare a chat request."""
        body = fields.model_dump(exclude_none=True)
        options = self.options(body)
        limit = fields.max_completion_tokens or fields.max_tokens
        if fields.max_tokens == 0:
            raise ApiError(status=400, message="max_tokens must be at least 1", param="max_tokens")
        single = fields.parallel_tool_calls is False
        grammar = grammar_of(fields, options, single=single)
        segments = await self.llm.in_worker(encode_chat, fields.messages, options)
        sources = await self._sources(segments)

        def build() -> Request:
            params = sampling_params(
                fields, self.defaults, self.llm.llm.tokenizer, max_tokens=self._limit(limit), grammar=grammar
            )
            return self.llm.llm.segments_request(segments, params, options, sources=sources, cache_salt=_salt(fields))

        return Job(requests=[await self.llm.in_worker(build)], priority=fields.priority or DEFAULT_PRIORITY)

    async def completion_job(self, fields: CompletionFields) -> Job:
        """Prepare raw prompts. `max_tokens` 0, for an echo alone, is served as 1."""
        prompts: list[Any] = fields.prompt if _is_list(fields.prompt) else [fields.prompt]  # type: ignore[assignment]
        if fields.max_tokens == 0 and not fields.echo:
            raise ApiError(status=400, message="max_tokens must be at least 1, unless echo is true", param="max_tokens")
        if fields.suffix is not None:
            if fields.echo or not all(isinstance(prompt, str) for prompt in prompts):
                raise ApiError(status=400, message="suffix needs prompts of text, without echo", param="suffix")
            prompts = [f"{FIM_BEGIN}{prompt}{FIM_HOLE}{fields.suffix}{FIM_END}" for prompt in prompts]
        limit = COMPLETION_TOKENS if fields.max_tokens is None else max(1, fields.max_tokens)
        grammar = grammar_of(fields, None)

        def build() -> list[Request]:
            params = sampling_params(
                fields, self.defaults, self.llm.llm.tokenizer, max_tokens=self._limit(limit), grammar=grammar
            )
            return [
                self.llm.llm.prompt_request(prompt, params, fit=True, cache_salt=_salt(fields)) for prompt in prompts
            ]

        return Job(requests=await self.llm.in_worker(build), priority=fields.priority or DEFAULT_PRIORITY)

    async def start(self, job: Job) -> None:
        """Queue everything that a job asks for, or nothing of it."""
        if self.draining or not self.llm.is_alive:
            raise ApiError(status=503, message="the server is shutting down")
        try:
            for request in job.requests:
                for stream in await self.llm.submit(request, priority=job.priority):
                    stream.choice = len(job.streams)
                    job.streams.append(stream)
        except BaseException:
            job.close()
            raise

    async def events(self, job: Job) -> AsyncGenerator[TokenEvent]:
        """Events of all choices of a started job; `request` is the number of the choice. Closing it aborts the job.

        Raises TimeoutError when the request has taken too long.
        """
        watch = self.metrics.watch(job.requests)
        self.num_active += 1
        limit, loop = self.settings.request_timeout, asyncio.get_running_loop()
        deadline = None if limit is None else loop.time() + limit
        try:
            async with aclosing(merged(job.streams)) as events:
                # Each step has the deadline for itself: whoever reads may take every event in a task of its own, and
                # a time-out belongs to the task that began it.
                while True:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(events, None)
                    if event is None:
                        break
                    watch.see(event)
                    yield event
        finally:
            self.num_active -= 1
            job.close()
            watch.end([stream.output for stream in job.streams])

    async def finish(self, job: Job) -> list[RequestOutput]:
        """Run a job to its end. Raises ApiError if a choice failed."""
        await self.start(job)
        async with aclosing(self.events(job)) as events:
            async for _ in events:
                pass
        return [served(output) for output in job.outputs]

    async def _sources(self, segments: Sequence[Segment]) -> list[bytes]:
        slots = [segment for segment in segments if isinstance(segment, ImageSlot)]
        addresses: list[tuple[str, str]] = []
        for slot in slots:
            if not isinstance(slot.source, str):
                raise ApiError(status=400, message=f"{slot.where}: an image must be an address", param=slot.where)
            addresses.append((slot.where, slot.source))
        with self.metrics.fetching():
            sources = await self.media.load(addresses) if addresses else []
        self.metrics.image_bytes.inc(sum(len(source) for source in sources))
        return sources

    def _limit(self, asked: int | None) -> int:
        longest = self.llm.llm.engine.max_model_len
        if asked is not None and asked > longest:
            raise ApiError(
                status=400, message=f"max_tokens {asked} is more than max_model_len {longest}", param="max_tokens"
            )
        return longest if asked is None else asked


def served(output: RequestOutput | None) -> RequestOutput:
    """The output of a choice that has ended. Raises ApiError where the engine ended it."""
    assert output is not None, "the last event comes with the output"
    if output.finish_reason == "abort":
        raise ApiError(status=503, message="the request was aborted")
    if output.finish_reason == "error":
        raise ApiError(status=500, message=f"the engine failed to serve this request: {(output.error or '')[:200]}")
    return output


def _is_list(prompt: Any) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _salt(fields: SamplingFields) -> bytes:
    return (fields.cache_salt or "").encode()
