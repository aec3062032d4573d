"""Which places in the network an image may come from.

Owns the policy of the operator, the check of a written URL, the check of the addresses its host name stands for, and
the connection to exactly those addresses. Invariants:
- a URL is parsed once, and the parsed object is what is checked and what is fetched;
- a host is refused if any of its addresses is refused, and the name is not resolved again between the check and the
  connection, so a name server that changes its answer gains nothing;
- what `read_url` says depends on the written URL alone. `FetchError` is for the log: its reasons tell about networks
  that the caller of the API cannot see, and must not reach them.

Called by `server.media`.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

import httpcore
import httpx

from deepspan.errors import ConfigError, ImageError

MAX_URL = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
MAX_HOST_NAME = 253

# Global by the registry, or too new for it, and still nothing a picture is served from.
REFUSED_V4 = (
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("168.63.129.16/32"),  # a cloud's own services for its machines
)
GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
REFUSED_V6 = (
    IPv6Network("2001::/23"),  # protocol assignments; Teredo, which lies inside, is judged by what it embeds
    IPv6Network("2001:db8::/32"),  # documentation
    IPv6Network("3fff::/20"),  # documentation
)
# The last 32 bits are an IPv4 address: the deprecated "compatible" form, which holds :: and ::1 too, and NAT64.
EMBED_LOW_BITS = (IPv6Network("::/96"), IPv6Network("64:ff9b::/96"))

IPAddress = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class FetchError(Exception):
    """An image that cannot be had from its URL. The text is for the log, never for the caller of the API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """What the operator lets requests read. Sizes in bytes, times in seconds.

    remote: http: and https: URLs may be fetched. domains: only from these hosts and their subdomains; empty = any.
    allow_private: also from addresses that are not public, for closed networks. ports: that may be connected to.
    file_root: folder whose files file: URLs may name; None = no file: URLs.
    max_bytes, max_total_bytes: of one image, of all images of a request. max_images: of a request, repeats counted.
    connect_timeout: to one address. total_timeout: for all images of a request together.
    parallel, parallel_total: images of one request loaded at a time, fetches of all requests at a time.
    """

    remote: bool = False
    domains: tuple[str, ...] = ()
    allow_private: bool = False
    ports: tuple[int, ...] = (80, 443)
    file_root: Path | None = None
    max_bytes: int = 32 * 2**20
    max_total_bytes: int = 64 * 2**20
    max_images: int = 64
    max_redirects: int = 3
    connect_timeout: float = 5.0
    total_timeout: float = 20.0
    parallel: int = 4
    parallel_total: int = 32

    def __post_init__(self) -> None:
        for domain in self.domains:
            if not _is_host_name(domain):
                raise ConfigError(f"media domains must be host names in lower-case ASCII, found {domain!r}")
        if min(self.parallel, self.parallel_total) < 1:
            raise ConfigError("media parallel and parallel_total must be at least 1")


def read_url(text: str, where: str, policy: MediaPolicy, *, base: httpx.URL | None = None) -> httpx.URL:
    """Parse and check a written URL, which stands at `where` in the request, or a redirect from `base`.

    Raises ImageError if it is malformed or the policy refuses it.
    """
    if len(text) > MAX_URL:
        raise ImageError(f"{where}: the URL has more than {MAX_URL} characters")
    # Parsers disagree on what these mean, and an honest URL has them percent-encoded.
    if any(char == "\\" or char.isspace() or not char.isprintable() for char in text):
        raise ImageError(f"{where}: the URL must not have whitespace, control characters or backslashes")
    try:
        url = httpx.URL(text) if base is None else base.join(text)
    except (httpx.InvalidURL, ValueError):
        raise ImageError(f"{where}: the URL cannot be parsed") from None

    if url.scheme not in DEFAULT_PORTS:
        raise ImageError(f"{where}: only http: and https: URLs can be fetched")
    if base is not None and base.scheme == "https" and url.scheme != "https":
        raise ImageError(f"{where}: a redirect must not leave https:")
    if url.userinfo:
        raise ImageError(f"{where}: the URL must not have a user name or password")
    if port_of(url) not in policy.ports:
        raise ImageError(f"{where}: the port of the URL must be one of {', '.join(map(str, policy.ports))}")
    _check_host(host_of(url), where, policy)
    return url


def host_of(url: httpx.URL) -> str:
    """The host as it is resolved: lower case, IDNA, no brackets."""
    return url.raw_host.decode("ascii")


def port_of(url: httpx.URL) -> int:
    """The port that will be connected to."""
    return DEFAULT_PORTS[url.scheme] if url.port is None else url.port


async def resolve(url: httpx.URL, policy: MediaPolicy, resolver: Resolver) -> list[str]:
    """Addresses that a connection for `url` may go to. Raises FetchError unless all of them may be connected to."""
    literal = _literal(host_of(url))
    found = await resolver(host_of(url), port_of(url)) if literal is None else [str(literal)]
    addresses = list(dict.fromkeys(found))
    if not addresses:
        raise FetchError("the host has no addresses")
    if not policy.allow_private:
        refused = [address for address in addresses if not is_public(ipaddress.ip_address(address))]
        if refused:
            raise FetchError(f"the host stands for addresses that are not public: {', '.join(refused)}")
    return addresses


def is_public(address: IPAddress) -> bool:
    """Whether packets to `address`, or to the IPv4 addresses embedded in it, leave for the public network."""
    if isinstance(address, IPv4Address):
        refused = any(address in network for network in REFUSED_V4)
        return address.is_global and not address.is_multicast and not refused
    if address.scope_id is not None:
        return False
    embedded = _embedded(address)
    if embedded:
        return all(is_public(part) for part in embedded)
    return address in GLOBAL_UNICAST_V6 and not any(address in network for network in REFUSED_V6)


class SystemResolver:
    """Addresses of a host by the system, in the system's order of preference.

    In threads of its own: a name server that never answers would otherwise take the threads that decode images.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="deepspan-resolver")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Raises OSError if the name cannot be resolved."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, socket.AF_UNSPEC, socket.SOCK_STREAM
        )
        return [str(address[0]) for *_, address in found]

    def close(self) -> None:
        """Take no more names; does not wait for lookups that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connections that go to checked addresses, whatever host they are for; Host and TLS stay by name.

    The addresses are tried in order: the first may be of a family that this machine has no route for.
    """

    def __init__(self, addresses: Sequence[str], inner: httpcore.AsyncNetworkBackend) -> None:
        assert addresses
        self._addresses = addresses
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first pinned address that answers; `host` is not looked at."""
        *others, last = self._addresses
        for address in others:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(last, port, timeout, local_address, socket_options)


def _check_host(host: str, where: str, policy: MediaPolicy) -> None:
    try:
        literal = _literal(host)
    except ValueError:
        raise ImageError(
            f"{where}: the host of the URL must be a name, an IPv4 address of four decimal numbers, "
            f"or an IPv6 address in brackets"
        ) from None
    if policy.domains and not any(host == domain or host.endswith(f".{domain}") for domain in policy.domains):
        raise ImageError(f"{where}: the host of the URL is not one that this server may fetch from")
    if literal is not None and not policy.allow_private and not is_public(literal):
        raise ImageError(f"{where}: the host of the URL must have a public address")


def _literal(host: str) -> IPAddress | None:
    """The address that `host` is, or None for a name. ValueError if it is neither in its usual spelling.

    Resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as IPv4; like browsers, we take any last label that is a number
    for the attempt to write an address.
    """
    if ":" in host:
        if "%" in host:
            raise ValueError("zones are local to a machine")
        return IPv6Address(host)
    if not _is_host_name(host):
        raise ValueError("not a host name")
    last = host.rpartition(".")[2]
    return IPv4Address(host) if last.isdigit() or last.startswith("0x") else None


def _is_host_name(host: str) -> bool:
    return len(host) <= MAX_HOST_NAME and HOST_NAME.fullmatch(host) is not None


def _embedded(address: IPv6Address) -> list[IPv4Address]:
    """IPv4 addresses that packets to `address` may end up at."""
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if any(address in network for network in EMBED_LOW_BITS):
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    return []
