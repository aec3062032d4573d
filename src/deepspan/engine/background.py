"""The step loop in a thread of its own, and streams of events for asyncio.

Owns the only thread that touches the core: requests and aborts go in through a queue and are taken between steps,
events come out through one stream per choice. Invariants: a stream ends with exactly one terminal event, whatever
breaks; a stream that is closed early aborts its request. Called by `deepspan.async_llm`.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.engine.core import EngineCore
from deepspan.errors import DeepspanError, OverloadedError

log = logging.getLogger(__name__)


class Stream:
    """Events of one choice of a request. Iterate it to the end, or `close` it. choice: number on its events."""

    def __init__(self, engine: "BackgroundEngine", choice: int) -> None:
        self._engine, self.choice = engine, choice
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self.request_id: int | None = None
        self.output: RequestOutput | None = None

    async def events(self) -> AsyncGenerator[TokenEvent]:
        """Every event, the terminal one last; `output` is set then. Breaking off aborts the request."""
        try:
            while True:
                event = await self._events.get()
                yield replace(event, request=self.choice)
                if event.finish_reason is not None:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self.output is None and self.request_id is not None:
            self._engine.abort(self.request_id)

    def deliver(self, event: TokenEvent, output: RequestOutput | None) -> None:
        """From the engine's thread."""

        def put() -> None:
            self.output = output
            self._events.put_nowait(event)

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop of whoever listened is closed
            log.debug("events of request %s go to nobody", self.request_id)


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    priority: int
    streams: list[Stream]
    accepted: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: int


class BackgroundEngine:
    """Runs a core until `stop`."""

    def __init__(self, core: EngineCore, max_queued: int = 1024) -> None:
        """max_queued: requests that may wait; more are refused."""
        self._core, self._max_queued = core, max_queued
        self._commands: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}
        self._num_queued = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="deepspan-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request, priority: int = 0) -> list[Stream]:
        """Queue a request; a stream per choice.

        Raises InputError if it could never be served, OverloadedError if too many are waiting or the engine is stopped.
        """
        if self._stopped:
            raise OverloadedError("the engine is stopped")
        if self._num_queued + self._core.stats().num_waiting >= self._max_queued:
            raise OverloadedError(f"{self._max_queued} requests are waiting already")
        streams = [Stream(self, choice) for choice in range(request.params.n)]
        accepted = asyncio.get_running_loop().create_future()
        self._num_queued += 1
        self._commands.put(_Add(request, priority, streams, accepted))
        if not self._thread.is_alive():  # it ended in between and reads no more
            self._refuse_all()
        await accepted
        return streams

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread.is_alive() and not self._stopped

    def abort(self, request_id: int) -> None:
        """End a request between two steps; its stream gets the terminal event."""
        self._commands.put(_Abort(request_id))

    def stop(self) -> None:
        """End all requests, then the thread."""
        self._stopped = True
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey_all():
                self._dispatch(self._core.step())
        except BaseException:
            log.exception("the engine's thread died")
            self._stopped = True
            self._bury()

    def _bury(self) -> None:
        """End every stream without the core, which nobody can trust any more."""
        error = "the engine died"
        for request_id, stream in self._streams.items():
            event = TokenEvent(
                request=request_id, token_id=None, text="", reasoning="", finish_reason="error", error=error
            )
            output = RequestOutput(
                text="",
                reasoning="",
                token_ids=(),
                finish_reason="error",
                num_prompt_tokens=0,
                num_image_tokens=0,
                error=error,
            )
            stream.deliver(event, output)
        self._streams.clear()
        self._refuse_all()

    def _obey_all(self) -> bool:
        """Take all commands that are there, waiting for one if there is nothing else to do. False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._core.has_work)
            except queue.Empty:
                return True
            if command is None:
                self._end_all()
                return False
            if isinstance(command, _Abort):
                self._dispatch(self._core.abort(command.request_id))
            else:
                self._add(command)

    def _end_all(self) -> None:
        self._dispatch(self._core.fail_all("the engine was stopped"))
        self._refuse_all()

    def _refuse_all(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                self._answer(command, OverloadedError("the engine is stopped"))

    def _add(self, command: _Add) -> None:
        error: DeepspanError | None = None
        try:
            ids = self._core.add(command.request, priority=command.priority)
        except DeepspanError as refused:
            error = refused
        else:
            for request_id, stream in zip(ids, command.streams, strict=True):
                stream.request_id = request_id
                self._streams[request_id] = stream
        self._answer(command, error)

    def _answer(self, command: _Add, error: DeepspanError | None) -> None:
        """Say whether a request was accepted, in the loop of whoever asked."""

        def answer() -> None:
            self._num_queued -= 1
            if command.accepted.cancelled():  # whoever asked has gone
                for stream in command.streams:
                    stream.close()
            elif error is not None:
                command.accepted.set_exception(error)
            else:
                command.accepted.set_result(None)

        command.accepted.get_loop().call_soon_threadsafe(answer)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams[event.request]
            if event.finish_reason is None:
                stream.deliver(event, None)
            else:
                del self._streams[event.request]
                stream.deliver(event, self._core.take(event.request))
