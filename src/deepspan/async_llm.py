"""Python API for asyncio: the same as `LLM`, with all requests in one running batch.

    async with AsyncLLM("path/to/checkpoint") as llm:
        answer = await llm.chat([{"role": "user", "content": "Hello"}])

Preparing a request (decoding images, tokenizing) runs in worker threads; the engine runs in a thread of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.engine.background import BackgroundEngine, Stream
from deepspan.engine.core import EngineStats
from deepspan.errors import InputError
from deepspan.llm import LLM, Message
from deepspan.text.switches import ChatOptions


class AsyncLLM:
    """A loaded model that serves many callers at once."""

    def __init__(self, model: str | Path | LLM, *, max_queued: int = 1024, **options: Any) -> None:
        """model: checkpoint folder, or a model that nobody else uses. options: of `LLM`. max_queued: requests that may
        wait; more are refused."""
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._engine = BackgroundEngine(self.llm.core, max_queued)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """End all requests and the engine's thread."""
        self._engine.stop()

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since it was made."""
        return self.llm.stats

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer a conversation: one output per choice. Cancelling the call aborts the request.

        priority: lower is served first. Raises InputError or OverloadedError.
        """
        request = await asyncio.to_thread(self.llm.chat_request, messages, params, options)
        return await self._collect(request, priority)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[RequestOutput]:
        """Continue a raw prompt; nothing is added to it. One output per choice."""
        request = await asyncio.to_thread(self.llm.prompt_request, prompt, params)
        return await self._collect(request, priority)

    async def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[TokenEvent]:
        """Answer a conversation token by token; the last event carries the finish reason. Breaking off aborts it."""
        request = await asyncio.to_thread(self.llm.chat_request, messages, params, options)
        if request.params.n != 1:
            raise InputError("a stream has one choice; use chat for more")
        (stream,) = await self._engine.submit(request, priority)
        async for event in stream.events():
            yield event

    async def _collect(self, request: Request, priority: int) -> list[RequestOutput]:
        streams = await self._engine.submit(request, priority)
        try:
            return list(await asyncio.gather(*(_output(stream) for stream in streams)))
        finally:
            for stream in streams:
                stream.close()


async def _output(stream: Stream) -> RequestOutput:
    async for _ in stream.events():
        pass
    assert stream.output is not None, "a stream ends with an output"
    return stream.output
