"""Python API for asyncio: the same as `LLM`, with all requests in one running batch.

    async with AsyncLLM("path/to/checkpoint") as llm:
        answer = await llm.chat([{"role": "user", "content": "Hello"}])

Preparing a request (decoding images, tokenizing) runs in a few worker threads that live as long as this object, since
each keeps a tokenizer of its own; the engine runs in a thread of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.engine.background import BackgroundEngine, Stream
from deepspan.engine.core import EngineStats
from deepspan.errors import InputError
from deepspan.llm import LLM, Message
from deepspan.text.switches import ChatOptions

T = TypeVar("T")


class AsyncLLM:
    """A loaded model that serves many callers at once."""

    def __init__(
        self, model: str | Path | LLM, *, max_queued: int = 1024, num_workers: int = 4, **options: Any
    ) -> None:
        """model: checkpoint folder, or a model that nobody else uses. options: of `LLM`. max_queued: requests that may
        wait; more are refused. num_workers: threads that prepare requests."""
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._engine = BackgroundEngine(self.llm.core, max_queued)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="deepspan-input")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """End all requests and the engine's thread."""
        self._engine.stop()
        self._workers.shutdown(wait=True, cancel_futures=True)

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served; false once the engine was stopped or its thread died."""
        return self._engine.is_alive

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since it was made."""
        return self.llm.stats

    async def in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what takes long, and may use the tokenizer, in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    async def submit(self, request: Request, *, priority: int = 0) -> list[Stream]:
        """Queue a prepared request; a stream per choice, each to be read to its end or closed.

        priority: lower is served first. Raises InputError or OverloadedError.
        """
        return await self._engine.submit(request, priority)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer a conversation: one output per choice. Cancelling the call aborts the request."""
        request = await self.in_worker(self.llm.chat_request, messages, params, options)
        return await self._collect(request, priority)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[RequestOutput]:
        """Continue a raw prompt; nothing is added to it. One output per choice."""
        request = await self.in_worker(self.llm.prompt_request, prompt, params)
        return await self._collect(request, priority)

    async def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[TokenEvent]:
        """Answer a conversation token by token; the last event carries the finish reason. Breaking off aborts it."""
        request = await self.in_worker(self.llm.chat_request, messages, params, options)
        if request.params.n != 1:
            raise InputError("a stream has one choice; use chat for more")
        (stream,) = await self.submit(request, priority=priority)
        async for event in stream.events():
            yield event

    async def _collect(self, request: Request, priority: int) -> list[RequestOutput]:
        streams = await self.submit(request, priority=priority)
        async with aclosing(merged(streams)) as events:
            async for _ in events:
                pass
        return outputs_of(streams)


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[TokenEvent]:
    """Events of all choices as they come; `request` of an event is the number of its choice. Close it to abort all."""
    if len(streams) == 1:
        async with aclosing(streams[0].events()) as events:
            async for event in events:
                yield event
        return
    arrived: asyncio.Queue[TokenEvent] = asyncio.Queue()

    async def pump(stream: Stream) -> None:
        async for event in stream.events():
            arrived.put_nowait(event)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            event = await arrived.get()
            num_open -= event.finish_reason is not None
            yield event
    finally:
        for task in pumps:
            task.cancel()
        for stream in streams:
            stream.close()
        await asyncio.gather(*pumps, return_exceptions=True)


def outputs_of(streams: Sequence[Stream]) -> list[RequestOutput]:
    """Outputs of streams that were read to their ends."""
    outputs = [stream.output for stream in streams if stream.output is not None]
    assert len(outputs) == len(streams), "a stream ends with an output"
    return outputs
