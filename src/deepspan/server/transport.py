"""Bytes in and out: bodies with limits, event streams, and clients that go away.

Invariants: a body is counted as it comes, never by what its header says; whatever serves a request is cancelled the
moment the client is gone. Called by `server.app` and the endpoints.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepspan.server.errors import ApiError
from deepspan.text.tools import strict_json

T = TypeVar("T")

MAX_DEPTH = 64
SLOW_BODY_SECONDS = 60.0
LARGE_BODY = 2**16  # bodies above this are parsed off the event loop
DONE = "data: [DONE]\n\n"
_END = object()
_STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises ApiError for another content type, a body over the limit (413) or too slow (408), and what is no JSON: NaN,
    infinities and nesting deeper than 64 among it.
    """
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(status=400, message="Content-Type must be application/json")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(SLOW_BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise ApiError(status=413, message=f"the body has more than {max_bytes} bytes")
                chunks.append(chunk)
    except TimeoutError as error:
        raise ApiError(status=408, message="the body did not arrive in time") from error
    body = b"".join(chunks)
    return await asyncio.to_thread(parse_json, body) if size > LARGE_BODY else parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises ApiError for anything but a JSON object."""
    try:
        text = body.decode("utf-8")
        if _depth_of(text) > MAX_DEPTH:
            raise ApiError(status=400, message=f"the body is nested more than {MAX_DEPTH} deep")
        parsed = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(status=400, message=f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise ApiError(status=400, message="the body must be a JSON object")
    return parsed


def dump_json(value: Any) -> str:
    """Compact JSON; what UTF-8 cannot say is escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which is cancelled if the client goes away. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Answer made of server-sent events, with comments where nothing comes for long.

    Whatever the events raise becomes a last event by `on_error`; the client going away closes their source.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str],
        on_error: Callable[[BaseException], list[str]],
        on_close: Callable[[], None],
        keep_alive: float,
    ) -> None:
        """events: whole events, ended by a blank line. keep_alive: seconds between comments.

        on_close: called when the answer is over. Events that were never asked for cannot clean up after themselves.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_error, self._on_close, self._keep_alive = events, on_error, on_close, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (sending, gone):
                waiting.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._texts()) as texts:
            async for text in texts:
                await send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncGenerator[str]:
        """What is sent; an error of the events, not of the sending, is among it."""
        try:
            async with aclosing(_with_pauses(self._events, self._keep_alive)) as events:
                async for event in events:
                    yield ": keep-alive\n\n" if event is None else event
        except Exception as error:
            for event in self._on_error(error):
                yield event


def data_event(value: Any, name: str | None = None) -> str:
    """One server-sent event. value: JSON, or text that stands as it is."""
    text = value if isinstance(value, str) else dump_json(value)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


async def _with_pauses(events: AsyncGenerator[str], seconds: float) -> AsyncGenerator[str | None]:
    """The events, and None for every pause of that length."""
    upcoming: asyncio.Future[Any] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait({upcoming}, timeout=seconds)
            if not done:
                yield None
                continue
            event, upcoming = upcoming.result(), None
            if event is _END:
                return
            yield event
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()  # type: ignore[attr-defined]


async def _next(events: AsyncGenerator[str]) -> Any:
    return await anext(events, _END)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _depth_of(text: str) -> int:
    """How deep JSON text is nested, without building it."""
    depth = deepest = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        first = text[found.start()]
        if first in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first != '"':
            depth -= 1
    return deepest
