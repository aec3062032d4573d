"""From the image addresses of a request to bytes: data: URLs, http(s): URLs, files of the operator.

Owns what may be read on behalf of a request and what it may cost. Invariants:
- every address is judged as written before the first one is fetched, so a request that is refused reaches nobody;
- the bytes of a request are counted while they arrive and never exceed its limits by more than a network read;
- whatever goes wrong in the network is one and the same message, so that nobody can explore a network through it;
  the reason is the `__cause__` of the error, for the log;
- nothing is remembered between requests: no cookies, no connections, no contents.

What the bytes are is not looked at: `image.decode` does that. Called by `server`.
"""

import asyncio
import os
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

import httpcore
import httpx

from deepspan.errors import ImageError
from deepspan.server.addresses import (
    MAX_URL,
    FetchError,
    MediaPolicy,
    PinnedBackend,
    Resolver,
    SystemResolver,
    read_url,
    resolve,
)
from deepspan.server.data_url import EXAMPLE, TEXT_WHITESPACE, decode_data_url

LONGEST_SCHEME = 16
REDIRECTS = (301, 302, 303, 307, 308)
NUM_TRIES = 2  # for a connection that fails and an error of the server

# Compressed transfer would have to be unpacked under a limit, and the formats served do not shrink.
REQUEST_HEADERS = [
    (b"User-Agent", b"deepspan"),
    (b"Accept", b"image/png,image/jpeg,image/webp,image/gif,*/*;q=0.1"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
]
NETWORK_ERRORS = (
    FetchError,
    ImageError,  # of a redirect: where it leads is not the user's to know
    OSError,
    UnicodeError,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
)


class _ServerError(FetchError):
    """A status of 5xx, which may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An address that was judged as written. url: parsed, for http(s): only."""

    where: str
    scheme: str
    address: str
    url: httpx.URL | None


@dataclass(slots=True, kw_only=True)
class _Budget:
    """What one request may still use. deadline: on the loop's clock."""

    deadline: float
    bytes_left: int
    slots: asyncio.Semaphore


class MediaLoader:
    """Loads the images of requests; one per server."""

    def __init__(
        self,
        policy: MediaPolicy,
        *,
        resolver: Resolver | None = None,
        backend: httpcore.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """resolver: addresses of a host, by default the system's. backend: makes connections to addresses.

        ssl_context: which certificates are believed, by default the public authorities and nothing of the environment.
        """
        self.policy = policy
        self._system_resolver = SystemResolver(policy.parallel_total)
        self._resolver: Resolver = resolver or self._system_resolver
        self._backend = backend or _system_backend()
        if ssl_context is None and policy.remote:
            ssl_context = httpx.create_ssl_context(trust_env=False)
        self._ssl_context = ssl_context
        self._slots = asyncio.Semaphore(policy.parallel_total)

    async def aclose(self) -> None:
        """Free what the loader holds; loads that still run fail."""
        self._system_resolver.close()

    async def load(self, slots: Sequence[tuple[str, str]]) -> list[bytes]:
        """Contents of the images of one request, in order. slots: place in the request, address.

        The same address is loaded once. Raises ImageError that names the place of the image at fault.
        """
        policy = self.policy
        if len(slots) > policy.max_images:
            where = slots[policy.max_images][0]
            raise ImageError(f"{where}: a request may have at most {policy.max_images} images, found {len(slots)}")
        sources: dict[str, _Source] = {}
        for where, address in slots:
            if address not in sources:
                sources[address] = _read_source(where, address, policy)
        budget = _Budget(
            deadline=asyncio.get_running_loop().time() + policy.total_timeout,
            bytes_left=policy.max_total_bytes,
            slots=asyncio.Semaphore(policy.parallel),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    address: group.create_task(self._load_source(source, budget)) for address, source in sources.items()
                }
        except* ImageError as errors:
            refusal = _first_error(errors)
        else:
            return [tasks[address].result() for _, address in slots]
        raise refusal

    async def _load_source(self, source: _Source, budget: _Budget) -> bytes:
        async with budget.slots:
            if source.url is None:
                data = await self._load_local(source, budget)
            else:
                data = await self._fetch(source.where, source.url, budget)
        if not data:
            raise ImageError(f"{source.where}: the image is empty")
        return data

    async def _load_local(self, source: _Source, budget: _Budget) -> bytes:
        where, policy = source.where, self.policy
        if source.scheme == "data":
            data = await asyncio.to_thread(decode_data_url, source.address, where, policy.max_bytes)
        else:
            data = await asyncio.to_thread(_read_file, source.address, where, policy)
        budget.bytes_left -= len(data)
        if budget.bytes_left < 0:
            raise ImageError(f"{where}: the images of a request may have at most {policy.max_total_bytes} bytes in all")
        return data

    async def _fetch(self, where: str, url: httpx.URL, budget: _Budget) -> bytes:
        policy = self.policy
        try:
            async with asyncio.timeout_at(budget.deadline), self._slots:
                return await self._follow(where, url, budget)
        except NETWORK_ERRORS as error:
            raise ImageError(
                f"{where}: the image could not be fetched; its URL must answer with status 200 and the image itself, "
                f"without Content-Encoding, in at most {policy.max_bytes} bytes ({policy.max_total_bytes} for all "
                f"images of the request), within {policy.total_timeout:g} seconds for the request"
            ) from error

    async def _follow(self, where: str, url: httpx.URL, budget: _Budget) -> bytes:
        """The image at `url` or where it redirects to; every hop is checked like the first."""
        for _ in range(self.policy.max_redirects + 1):
            addresses = await resolve(url, self.policy, self._resolver)
            answer = await self._get_with_retry(url, PinnedBackend(addresses, self._backend), budget)
            if isinstance(answer, bytes):
                return answer
            url = read_url(answer, where, self.policy, base=url)
        raise FetchError("too many redirects")

    async def _get_with_retry(self, url: httpx.URL, backend: PinnedBackend, budget: _Budget) -> bytes | str:
        for _ in range(NUM_TRIES - 1):
            try:
                return await self._get(url, backend, budget)
            except (httpcore.ConnectError, _ServerError):
                continue
        return await self._get(url, backend, budget)

    async def _get(self, url: httpx.URL, backend: PinnedBackend, budget: _Budget) -> bytes | str:
        """One GET: the body, or the target of a redirect as it is written there."""
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        headers = [(b"Host", url.netloc), *REQUEST_HEADERS]
        # A pool of its own: a kept connection would be to an address that was checked for another request.
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context, network_backend=backend, max_connections=1, max_keepalive_connections=0
            ) as pool,
            pool.stream(
                "GET", target, headers=headers, extensions={"timeout": {"connect": self.policy.connect_timeout}}
            ) as response,
        ):
            fields = [(name.lower(), value.strip()) for name, value in response.headers]
            if response.status in REDIRECTS:
                return _location(fields)
            if response.status >= 500:
                raise _ServerError(f"status {response.status}")
            if response.status != 200:
                raise FetchError(f"status {response.status}")
            if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in fields):
                raise FetchError("a content encoding that was not asked for")
            return await self._read_body(response, budget)

    async def _read_body(self, response: httpcore.Response, budget: _Budget) -> bytes:
        """The announced length is not looked at: it may lie, and the count costs nothing."""
        body = bytearray()  # not a list of chunks: a hostile server sends them a byte at a time
        async for chunk in response.aiter_stream():
            body += chunk
            budget.bytes_left -= len(chunk)
            if len(body) > self.policy.max_bytes or budget.bytes_left < 0:
                raise FetchError("too many bytes")
        return bytes(body)


def _system_backend() -> httpcore.AsyncNetworkBackend:
    backend = httpcore.AnyIOBackend()
    assert isinstance(backend, httpcore.AsyncNetworkBackend)  # httpcore puts a stand-in where anyio is not installed
    return backend


def _first_error(errors: BaseExceptionGroup[ImageError]) -> ImageError:
    error = errors.exceptions[0]
    assert isinstance(error, ImageError)  # the tasks open no groups of their own
    return error


def _location(fields: Sequence[tuple[bytes, bytes]]) -> str:
    targets = [value for name, value in fields if name == b"location"]
    if len(targets) != 1 or not targets[0]:
        raise FetchError("a redirect needs one target")
    return targets[0].decode("ascii")


def _read_source(where: str, address: str, policy: MediaPolicy) -> _Source:
    """Judge an address by its spelling alone. Raises ImageError if it is none that could be loaded."""
    head, colon, _ = address[: LONGEST_SCHEME + 1].lstrip(TEXT_WHITESPACE).partition(":")
    scheme = head.lower() if colon else ""
    url = None
    if scheme in ("http", "https"):
        if not policy.remote:
            raise ImageError(f"{where}: this server does not fetch images; send the image itself as {EXAMPLE}")
        url = read_url(address, where, policy)
    elif scheme == "file":
        if policy.file_root is None:
            raise ImageError(f"{where}: this server does not open file: URLs; send the image itself as {EXAMPLE}")
    elif scheme != "data":
        raise ImageError(
            f"{where}: an image must be given as a data:, https:, http: or file: URL; paths are not opened, and base64 "
            f"needs its prefix: {EXAMPLE}"
        )
    return _Source(where=where, scheme=scheme, address=address, url=url)


def _read_file(address: str, where: str, policy: MediaPolicy) -> bytes:
    """Contents of a regular file inside of the operator's folder, links resolved."""
    assert policy.file_root is not None
    path = _file_path(address, where)
    no_file = "there is no regular file at this place that could be read"
    try:
        root = policy.file_root.resolve(strict=True)
        path = path.resolve()
        if not path.is_relative_to(root):
            raise ImageError(f"{where}: the file must lie in the folder that this server opens images from")
        data = _read_regular(path, policy.max_bytes)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ImageError(f"{where}: {no_file}") from error
    if data is None:
        raise ImageError(f"{where}: {no_file}")
    if len(data) > policy.max_bytes:
        raise ImageError(f"{where}: the file has more than {policy.max_bytes} bytes")
    return data


def _file_path(address: str, where: str) -> Path:
    rest = address.partition(":")[2]
    if rest.startswith("//"):
        host, slash, tail = rest[2:].partition("/")
        local, rest = host.lower() in ("", "localhost"), slash + tail
    else:
        local = True
    well_formed = len(address) <= MAX_URL and rest.isprintable() and not any(mark in rest for mark in ("?", "#", "%00"))
    if not local or not well_formed or not rest.startswith("/"):
        raise ImageError(f"{where}: a file: URL must look like file:///folder/picture.png")
    # Decoded once and before any check, so that an encoded slash or dot is judged as what the system will see.
    return Path(os.fsdecode(unquote_to_bytes(rest)))


def _read_regular(path: Path, max_bytes: int) -> bytes | None:
    """Contents, up to one byte more than `max_bytes` to tell that there are more; None if it is no regular file.

    The file may be exchanged between the look and the opening: no link is followed, and no pipe is waited for.
    """
    if not path.is_file():
        return None
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        return file.read(max_bytes + 1)
