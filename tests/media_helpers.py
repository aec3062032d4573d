"""Sites, names and loaders for tests of images by address.

Names of public hosts resolve to public addresses by a stub, and a stub in place of the network leads the connection to
a server on this machine, so that the check of addresses is on in nearly every test.
"""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpcore
import pytest

from deepspan.errors import ImageError
from deepspan.server.media import MediaLoader, MediaPolicy

PUBLIC = "93.184.216.34"
PICTURE = bytes(range(256)) * 3 + b"\xff"  # 769 bytes: base64 of it has padding and both special symbols
WHERE = "messages[0].content[1].image_url.url"
NOT_FETCHED = "the image could not be fetched"
PATIENT = {"total_timeout": 3600.0, "connect_timeout": 3600.0}  # a busy machine must not fail a test

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Answer = bytes | Handler


def response(body: bytes = PICTURE, status: str = "200 OK", length: int | None = None, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n{extra}\r\n"
    return head.encode() + body


def redirect(target: str, status: str = "302 Found") -> bytes:
    return response(b"", status, extra=f"Location: {target}\r\n")


@dataclass
class Site:
    """A server on this machine. requests: heads as they came in."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def site(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """Gives the n-th request the n-th answer; further requests get the last one."""
    made = Site()
    handlers: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        try:
            made.requests.append(await reader.readuntil(b"\r\n\r\n"))
            answer = answers[min(len(made.requests), len(answers)) - 1]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client had enough
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await asyncio.gather(*(task for task in handlers if task), return_exceptions=True)
        await server.wait_closed()


class Detour(httpcore.AsyncNetworkBackend):
    """Leads every connection to this machine and notes where it was meant to go; may fail the first ones."""

    def __init__(self, *failures: Exception) -> None:
        self.hosts: list[str] = []
        self.failures = list(failures)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.hosts.append(host)
        if self.failures:
            raise self.failures.pop(0)
        return await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", port, timeout, local_address, socket_options)


class Names:
    """A resolver: each call takes the next list of addresses, the last one stays."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers) or [[PUBLIC]]
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def loader(
    *,
    resolver: Callable[[str, int], Awaitable[list[str]]] | None = None,
    backend: httpcore.AsyncNetworkBackend | None = None,
    ssl_context: ssl.SSLContext | None = None,
    **policy: object,
) -> AsyncIterator[MediaLoader]:
    made = MediaLoader(
        MediaPolicy(**PATIENT | policy),
        resolver=resolver or Names(),
        backend=backend or Detour(),
        ssl_context=ssl_context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # reading the authorities takes a while
    )
    try:
        yield made
    finally:
        await made.aclose()


def load(*addresses: str, **options: object) -> list[bytes]:
    """Load images that stand at slot[0], slot[1], ..."""

    async def run() -> list[bytes]:
        async with loader(**options) as made:
            return await made.load([(f"slot[{index}]", address) for index, address in enumerate(addresses)])

    return asyncio.run(run())


def fetch(*answers: Answer, url: str = "http://pictures.example:{port}/a.png", **options: object) -> bytes:
    """Fetch one image from a site with these answers."""

    async def run() -> bytes:
        async with (
            site(*answers) as web,
            loader(**{"remote": True, "ports": (web.port,)} | options) as made,
        ):
            return (await made.load([(WHERE, url.format(port=web.port))]))[0]

    return asyncio.run(run())


def refused(where: str, text: str) -> pytest.RaisesExc[ImageError]:
    return pytest.raises(ImageError, match=rf"^{where.replace('[', '.').replace(']', '.')}: .*{text}")


def b64(data: bytes = PICTURE) -> str:
    return base64.b64encode(data).decode()


def data(contents: bytes) -> str:
    return f"data:image/png;base64,{b64(contents)}"


PADDED = b64()
