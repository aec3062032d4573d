"""Images of a request from data: URLs, files and the network: what is accepted, what is refused, and how.

Names of public hosts resolve to public addresses by a stub, and a stub in place of the network leads the connection to
a server on this machine, so that the check of addresses is on in nearly every test.
"""

import asyncio
import base64
import os
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote_from_bytes

import httpcore
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspan.errors import ConfigError, ImageError
from deepspan.server import data_url
from deepspan.server.addresses import SystemResolver, is_public, read_url
from deepspan.server.data_url import decode_data_url
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


# data: URLs


PADDED, URL_SAFE = b64(), base64.urlsafe_b64encode(PICTURE).decode()
LINES = "\r\n".join(PADDED[start : start + 76] for start in range(0, len(PADDED), 76))
ACCEPTED = {
    "standard": f"data:image/png;base64,{PADDED}",
    "url-safe": f"data:image/png;base64,{URL_SAFE}",
    "url-safe without padding": f"data:image/png;base64,{URL_SAFE.rstrip('=')}",
    "without padding": f"data:image/png;base64,{PADDED.rstrip('=')}",
    "in lines": f"data:image/png;base64,{LINES}\n",
    "blanks at the ends": f" \n data:image/png;base64, {PADDED} ",
    "upper case": f"DATA:IMAGE/PNG;BASE64,{PADDED}",
    "charset": f"data:image/png;charset=utf-8;base64,{PADDED}",
    "other parameters": f"data:image/png; name=a.png ;;x=y; base64,{PADDED}",
    "base64 is not the last parameter": f"data:image/png;base64;charset=utf-8,{PADDED}",
    "type of another format": f"data:image/gif;base64,{PADDED}",
    "unknown image type": f"data:image/svg+xml;base64,{PADDED}",
    "special symbols escaped": f"data:image/png;base64,{quote_from_bytes(PADDED.encode(), safe='')}",
    "all symbols escaped": "data:image/png;base64," + "".join(f"%{code:02x}" for code in PADDED.encode()),
    "line breaks escaped": "data:image/png;base64," + LINES.replace("\r\n", "%0D%0a"),
    "escaped bytes": f"data:image/png,{quote_from_bytes(PICTURE)}",
    "escaped bytes but blanks": f"data:image/png,{quote_from_bytes(PICTURE, safe=' ')}",
    "escaped bytes with a charset": f"data:image/png;charset=binary,{quote_from_bytes(PICTURE)}",
    "escaped bytes in lower case, in lines": "data:image/png," + "\n".join(f"%{code:02x}" for code in PICTURE),
    "a fragment": f"data:image/png;base64,{PADDED}#top",
}
REFUSED = {
    "no comma": (f"data:image/png;base64;{PADDED}", "needs a comma"),
    "comma far away": (f"data:image/png;name={'a' * 2000};base64,{PADDED}", "needs a comma"),
    "no type": (f"data:;base64,{PADDED}", "must be image/"),
    "nothing but data": (f"data:,{PADDED}", "must be image/"),
    "other type": (f"data:application/octet-stream;base64,{PADDED}", "must be image/"),
    "half a type": (f"data:image/;base64,{PADDED}", "must be image/"),
    "like an http: URL": (f"data://image/png;base64,{PADDED}", "must be image/"),
    "foreign letter": (f"data:image/png;base64,{PADDED[:8]}é{PADDED[8:]}", "must be ASCII"),
    "foreign blank": (f"data:image/png;base64,{PADDED[:8]}\u00a0{PADDED[8:]}", "must be ASCII"),
    "zero byte": (f"data:image/png;base64,{PADDED[:8]}\0{PADDED[8:]}", "not valid base64"),
    "foreign symbol": (f"data:image/png;base64,{PADDED[:8]}!{PADDED[8:]}", "not valid base64"),
    "query": (f"data:image/png;base64,{PADDED}?x", "not valid base64"),
    "both alphabets": ("data:image/png;base64,+/-_", "not valid base64"),
    "half the padding": (f"data:image/png;base64,{PADDED[:-1]}", "not valid base64"),
    "too much padding": (f"data:image/png;base64,{PADDED}=", "not valid base64"),
    "padding inside": (f"data:image/png;base64,{PADDED}{PADDED}", "not valid base64"),
    "one symbol too many": ("data:image/png;base64,QUJDR", "not valid base64"),
    "escape cut off": (f"data:image/png;base64,{PADDED}%4", "two hexadecimal digits"),
    "escape of other digits": ("data:image/png,%89PN%G0", "two hexadecimal digits"),
    "escape of one digit": ("data:image/png,%89PN%0G", "two hexadecimal digits"),
    "escape in an escape": ("data:image/png,%%4141", "two hexadecimal digits"),
    "empty": ("data:image/png;base64,", "the image is empty"),
}


@pytest.mark.parametrize("address", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_data_url_of_accepted_form_gives_its_bytes(address):
    assert load(address) == [PICTURE]


@pytest.mark.parametrize(("address", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_data_url_of_broken_form_is_refused(address, text):
    with refused("slot[0]", text) as caught:
        load(address)
    assert PADDED[:8] not in str(caught.value)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[bytes, str]:
    contents = draw(st.binary(min_size=1, max_size=64))
    coin = random.Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        encode = draw(st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
        plain, kind = encode(contents), ";base64"
        if draw(st.booleans()):
            plain = plain.rstrip(b"=")
        blanks = [" ", "\t", "\n", "\r", "\f", "%0A", "%20"]
    else:
        plain, kind, blanks = contents, "", ["\n", "\r", "\t"]
    must_escape = b"%#, \t\n\r\f\v"
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    body = ""
    for code in plain:
        escape = code > 126 or code < 32 or code in must_escape or coin.random() < share
        body += coin.choice([f"%{code:02x}", f"%{code:02X}"]) if escape else chr(code)
        body += coin.choice(blanks) if coin.random() < 0.1 else ""
    head = draw(st.sampled_from(["data:image/png", "DATA:Image/WebP", "data:image/png;charset=utf-8", "data: image/x"]))
    return contents, f"{head}{draw(st.sampled_from([kind, kind.upper()]))},{body}"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both only measure how busy the machine is
@given(spellings())
def test_data_url_of_any_spelling_gives_its_bytes(case):
    contents, address = case
    assert decode_data_url(address, WHERE, len(contents)) == contents


@pytest.mark.parametrize("shift", range(4))
def test_data_url_longer_than_a_slice_gives_its_bytes(shift):
    contents = b"x" * shift + PICTURE * (2 * data_url.SLICE // len(PICTURE))
    escaped = "data:image/png," + "x" * shift + "".join(f"%{code:02x}" for code in contents[shift:])
    plain = "data:image/png;base64," + base64.urlsafe_b64encode(contents).decode()
    assert decode_data_url(escaped, WHERE, len(contents)) == contents
    assert decode_data_url(plain, WHERE, len(contents)) == contents


@pytest.mark.parametrize("name", ACCEPTED)
def test_data_url_over_the_limit_is_refused_before_it_is_decoded(name, monkeypatch):
    assert decode_data_url(ACCEPTED[name], WHERE, len(PICTURE)) == PICTURE
    monkeypatch.setattr(data_url.binascii, "a2b_base64", None)
    with refused(WHERE, "at most 768 are allowed"):
        decode_data_url(ACCEPTED[name], WHERE, len(PICTURE) - 1)


# files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the operator, with a picture in it and a secret next to it."""
    root = tmp_path / "media"
    (root / "in ner").mkdir(parents=True)
    (root / "in ner" / "ü%41.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "inside.png").symlink_to(root / "in ner" / "ü%41.png")
    (root / "outside.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "loop.png").symlink_to(root / "loop.png")
    os.mkfifo(root / "pipe.png")
    return root


@pytest.mark.parametrize(
    "spelling",
    [
        "file://{root}/in%20ner/%C3%BC%2541.png",
        "file:{root}/in%20ner/%c3%bc%2541.png",
        "FILE://localhost{root}/in%20ner/ü%2541.png",
        "file://{root}/in%20ner%2F%C3%BC%2541.png",
        "file://{root}/in%20ner/../inside.png",
        "file://{root}/up/media/inside.png",
    ],
)
def test_file_inside_the_folder_is_read(folder, spelling):
    assert load(spelling.format(root=folder), file_root=folder) == [PICTURE]


@pytest.mark.parametrize("link", ["media", "link"])
def test_file_under_a_linked_folder_is_read(folder, link):
    (folder.parent / "link").symlink_to(folder)
    assert load(f"file://{folder}/inside.png", file_root=folder.parent / link) == [PICTURE]


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        ("/../secret.png", "must lie in the folder"),
        ("/..%2Fsecret.png", "must lie in the folder"),
        ("/%2e%2e%2fsecret.png", "must lie in the folder"),
        ("/outside.png", "must lie in the folder"),
        ("/up/secret.png", "must lie in the folder"),
        ("/../missing.png", "must lie in the folder"),
        ("-twin/secret.png", "must lie in the folder"),
        ("/missing.png", "no regular file"),
        ("/%252e%252e%252fsecret.png", "no regular file"),
        ("/pipe.png", "no regular file"),
        ("/in%20ner", "no regular file"),
        ("/loop.png", "no regular file|must lie in the folder"),
        ("/inside.png/x.png", "no regular file"),
        ("/" + "a" * 300, "no regular file"),
        ("/inside.png?x", "must look like file:///"),
        ("/inside.png#x", "must look like file:///"),
        ("/inside.png%00", "must look like file:///"),
        ("/inside.png\0", "must look like file:///"),
        ("/" + "a/" * 5000, "must look like file:///"),
    ],
)
def test_file_that_is_no_picture_of_the_folder_is_refused(folder, tail, text):
    with refused("slot[0]", text) as caught:
        load(f"file://{folder}{tail}", file_root=folder)
    assert str(folder) not in str(caught.value)


@pytest.mark.parametrize("address", ["file://elsewhere{root}/inside.png", "file:inside.png", "file:", "file://"])
def test_file_url_without_local_absolute_path_is_refused(folder, address):
    with refused("slot[0]", "must look like file:///"):
        load(address.format(root=folder), file_root=folder)


def test_file_swapped_for_a_pipe_after_the_look_is_refused_without_waiting(folder, monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with refused("slot[0]", "no regular file"):
        load(f"file://{folder}/pipe.png", file_root=folder)


def test_file_over_the_limit_is_refused(folder):
    assert load(f"file://{folder}/inside.png", file_root=folder, max_bytes=len(PICTURE)) == [PICTURE]
    with refused("slot[0]", "more than 768 bytes"):
        load(f"file://{folder}/inside.png", file_root=folder, max_bytes=len(PICTURE) - 1)


def test_file_without_a_folder_of_the_operator_is_refused(folder):
    with refused("slot[0]", "does not open file: URLs; send the image itself"):
        load(f"file://{folder}/inside.png")


# addresses that are none of these


@pytest.mark.parametrize(
    "address",
    [
        "/etc/passwd",
        "picture.png",
        "../a.png",
        "C:\\a.png",
        "ftp://h/a.png",
        "gopher://h/a",
        "blob:http://h/a",
        "//h/a.png",
    ],
)
def test_address_of_unknown_kind_is_refused(address):
    with refused("slot[0]", "must be given as a data:, https:, http: or file: URL") as caught:
        load(address, remote=True)
    assert address not in str(caught.value)


def test_address_of_bare_base64_is_refused_with_a_hint():
    with refused("slot[0]", "base64 needs its prefix: data:image/png;base64,"):
        load(PADDED)


# limits of a request


def test_load_of_many_images_keeps_their_order():
    contents = [bytes([index]) * (index + 1) for index in range(20)]
    assert load(*map(data, contents)) == contents
    assert load() == []


def test_load_of_mixed_sources_keeps_their_order(folder):
    async def run() -> list[bytes]:
        async with site(response(b"remote")) as web, loader(remote=True, ports=(web.port,), file_root=folder) as made:
            addresses = [f"http://a.example:{web.port}/", data(b"data"), f"file://{folder}/inside.png"]
            return await made.load([("x", address) for address in addresses])

    assert asyncio.run(run()) == [b"remote", b"data", PICTURE]


def test_load_of_the_same_url_twice_fetches_it_once():
    async def run() -> None:
        async with (
            site(response(b"1"), response(b"2"), response(b"3")) as web,
            loader(remote=True, ports=(web.port,), max_total_bytes=2, parallel=1) as made,
        ):
            first, second = (f"http://a.example:{web.port}/{name}" for name in "xy")
            assert await made.load([("x", first), ("y", second), ("z", first)]) == [b"1", b"2", b"1"]
            assert len(web.requests) == 2
            assert await made.load([("x", first)]) == [b"3"]  # and remembers nothing

    asyncio.run(run())


def test_load_of_too_many_images_is_refused():
    assert load(*[data(b"a")] * 3, max_images=3) == [b"a"] * 3
    with refused("slot[3]", "at most 3 images, found 4"):
        load(*[data(b"a")] * 4, max_images=3)


def test_load_of_the_same_bad_address_twice_names_the_first():
    with refused("slot[0]", "not valid base64"):
        load(*["data:image/png;base64,!"] * 2)


def test_load_of_too_many_bytes_in_all_is_refused():
    assert load(data(b"aaa"), data(b"bbb"), data(b"aaa"), max_total_bytes=6) == [b"aaa", b"bbb", b"aaa"]
    with refused("slot[1]", "at most 5 bytes in all"):
        load(data(b"aaa"), data(b"bbb"), max_total_bytes=5, parallel=1)


def test_load_with_one_bad_address_fetches_nothing():
    backend, resolver = Detour(), Names()
    with refused("slot[1]", "must be given as"):
        load("http://a.example/", "gopher://b.example/", remote=True, backend=backend, resolver=resolver)
    assert resolver.asked == backend.hosts == []


def test_load_with_one_bad_image_ends_the_others():
    async def stalled(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    async def run() -> None:
        async with site(stalled) as web, loader(remote=True, ports=(web.port,)) as made:
            with refused("bad", "not valid base64"):
                await made.load([("slow", f"http://a.example:{web.port}/"), ("bad", "data:image/png;base64,!")])

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"parallel": 2}, {"parallel_total": 2}])
def test_load_of_many_urls_keeps_to_the_parallel_limit(limits):
    running = most = 0

    async def slow(_host: str, _port: int) -> list[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(100):  # turns of the loop, in which others could start
            await asyncio.sleep(0)
        running -= 1
        return [PUBLIC]

    async def run() -> None:
        async with site(response()) as web, loader(remote=True, ports=(web.port,), resolver=slow, **limits) as made:
            await made.load([("x", f"http://a.example:{web.port}/{index}") for index in range(6)])

    asyncio.run(run())
    assert most == 2


def test_load_of_urls_counts_their_bytes_together():
    async def run(max_total_bytes: int) -> list[bytes]:
        options = {"max_total_bytes": max_total_bytes, "max_bytes": 3}
        async with site(response(b"abc")) as web, loader(remote=True, ports=(web.port,), **options) as made:
            return await made.load([("x", f"http://a.example:{web.port}/{index}") for index in range(2)])

    assert asyncio.run(run(6)) == [b"abc"] * 2
    with refused("x", NOT_FETCHED):
        asyncio.run(run(5))


# the written URL


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://u:p@a.example/", "must not have a user name"),
        ("http://u@a.example/", "must not have a user name"),
        ("http://a.example@b.example/", "must not have a user name"),
        ("http://a.example:22/", "port of the URL must be one of 80, 443"),
        ("https://a.example:0/", "port of the URL must be one of 80, 443"),
        ("http://a.example:x/", "cannot be parsed"),
        ("http://[::1/", "cannot be parsed|must be a name"),
        ("http://\u2603.example/", "cannot be parsed"),
        ("http://a.example/\u00a0", "whitespace, control"),
        (" http://a.example/", "whitespace, control"),
        ("http://a.example/ b", "whitespace, control"),
        ("http://a.example\\@b.example/", "whitespace, control characters or backslashes"),
        ("http://a.example/\x7f", "whitespace, control"),
        ("http://a.example/\ud800", "whitespace, control"),
        ("http://a.example/" + "a" * 8192, "more than 8192 characters"),
        ("http:///a", "must be a name"),
        ("http:a.example", "must be a name"),
        ("http://a..example/", "must be a name"),
        ("http://a.example./", "must be a name"),
        ("http://%61.example/", "must be a name"),
        ("http://" + "a" * 64 + ".example/", "must be a name"),
        ("http://" + "a." * 130 + "example/", "must be a name"),
        ("http://2130706433/", "four decimal numbers"),
        ("http://0x7f.1/", "four decimal numbers"),
        ("http://0x7f000001/", "four decimal numbers"),
        ("http://0177.0.0.1/", "cannot be parsed"),
        ("http://0177.1/", "four decimal numbers"),
        ("http://127.1/", "four decimal numbers"),
        ("http://134744072/", "four decimal numbers"),
        ("http://127\u30020\u30020\u30021/", "public address"),
        ("http://127.0.0.1/", "public address"),
        ("http://169.254.169.254/latest/meta-data", "public address"),
        ("http://[::1]/", "public address"),
        ("http://[::ffff:127.0.0.1]/", "public address"),
        ("http://[::ffff:7f00:1]/", "public address"),
        ("http://[fe80::1%25eth0]/", "must be a name"),
    ],
)
def test_url_that_the_policy_refuses_as_written_is_refused_unasked(url, text):
    backend, resolver = Detour(), Names()
    with refused("slot[0]", text) as caught:
        load(url, remote=True, backend=backend, resolver=resolver)
    assert resolver.asked == backend.hosts == []
    assert "example" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "host", "accepted"),
    [
        ("a.example", "a.example", True),
        ("A.Example", "a.example", True),
        ("cdn.a.example", "a.example", True),
        ("b\u00fccher.a.example", "a.example", True),
        ("xa.example", "a.example", False),
        ("a.example.evil.example", "a.example", False),
        ("93.184.216.34", "a.example", False),
        ("93.184.216.34", "93.184.216.34", True),
    ],
)
def test_url_with_an_allow_list_is_judged_by_host_and_suffix(url, host, accepted):
    policy = MediaPolicy(remote=True, domains=("other.example", host))
    if accepted:
        assert isinstance(read_url(f"https://{url}/", WHERE, policy), httpx.URL)
        return
    with refused(WHERE, "not one that this server may fetch from"):
        read_url(f"https://{url}/", WHERE, policy)


def test_url_on_a_server_that_does_not_fetch_is_refused():
    with refused("slot[0]", "does not fetch images; send the image itself"):
        load("https://a.example/")


@pytest.mark.parametrize("domain", ["A.example", ".a.example", "a.example.", "*.example", "http://a.example", ""])
def test_policy_with_a_malformed_domain_is_refused(domain):
    with pytest.raises(ConfigError, match="lower-case ASCII"):
        MediaPolicy(domains=(domain,))


# addresses


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("172.16.0.1", False),
        ("172.32.0.1", True),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("192.168.0.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("239.255.255.250", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("2606:4700:4700::1111", True),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%1", False),
        ("2606:4700:4700::1111%1", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
        ("3fff::1", False),
        ("2001:20::1", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("::8.8.8.8", True),
        ("::127.0.0.1", False),
        ("64:ff9b::8.8.8.8", True),
        ("64:ff9b::169.254.169.254", False),
        ("64:ff9b:1::8.8.8.8", False),
        ("2002:808:808::1", True),
        ("2002:7f00:1::1", False),
        ("2002:a00:1::1", False),
        ("2001:0:808:808::f7f7:f7f7", True),  # Teredo: server 8.8.8.8, client inverted 8.8.8.8
        ("2001:0:7f00:1::f7f7:f7f7", False),
        ("2001:0:808:808::80ff:fffe", False),
    ],
)
def test_address_is_public_only_if_packets_leave(address, public):
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["64:ff9b::a00:1"], ["::ffff:127.0.0.1", PUBLIC], []]
)
def test_host_with_any_refused_address_is_not_connected_to(addresses):
    backend = Detour()
    with refused("slot[0]", NOT_FETCHED):
        load("http://a.example/", remote=True, resolver=Names(addresses), backend=backend)
    assert backend.hosts == []


def test_host_that_changes_its_address_is_connected_to_where_it_was_checked():
    resolver, backend = Names([PUBLIC], ["127.0.0.1"]), Detour(httpcore.ConnectError())
    assert fetch(response(), resolver=resolver, backend=backend) == PICTURE
    assert resolver.asked == ["pictures.example"]
    assert backend.hosts == [PUBLIC, PUBLIC]


def test_host_whose_first_address_does_not_answer_is_connected_to_at_the_next():
    backend = Detour(httpcore.ConnectTimeout())
    resolver = Names(["2606:4700::1", PUBLIC])
    assert fetch(response(), resolver=resolver, backend=backend) == PICTURE
    assert backend.hosts == ["2606:4700::1", PUBLIC]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_private_host_on_a_closed_network_is_fetched(host):
    async def run() -> list[bytes]:
        async with site(response()) as web:
            policy = MediaPolicy(remote=True, allow_private=True, ports=(web.port,), **PATIENT)
            resolver = Names(["127.0.0.2", "127.0.0.1"])  # the first has no such port
            made = MediaLoader(policy, resolver=resolver, ssl_context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            loaded = await made.load([(WHERE, f"http://{host}:{web.port}/a.png")])
            await made.aclose()
            return loaded

    assert asyncio.run(run()) == [PICTURE]


def test_system_resolver_of_written_address_returns_it():
    async def run() -> list[str]:
        resolver = SystemResolver(1)
        try:
            return await resolver("127.0.0.1", 80)
        finally:
            resolver.close()

    assert asyncio.run(run()) == ["127.0.0.1"]


# requests and answers


def test_request_has_the_name_of_the_host_and_nothing_of_the_environment(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def run() -> tuple[int, list[bytes]]:
        answers = redirect("/b?c=%20d#e"), response(extra="Set-Cookie: a=b\r\n"), response()
        async with site(*answers) as web, loader(remote=True, ports=(web.port,)) as made:
            await made.load([(WHERE, f"http://Pictures.Example:{web.port}/a")])
            await made.load([(WHERE, f"http://pictures.example:{web.port}/a")])
            return web.port, web.requests

    port, requests = asyncio.run(run())
    heads = [request.decode().splitlines() for request in requests]
    assert [head[0] for head in heads] == ["GET /a HTTP/1.1", "GET /b?c=%20d HTTP/1.1", "GET /a HTTP/1.1"]
    for head in heads:
        assert {line.partition(":")[0].lower() for line in head[1:] if line} == {
            "host",
            "user-agent",
            "accept",
            "accept-encoding",
            "connection",
        }
        assert f"Host: pictures.example:{port}" in head
        assert "User-Agent: deepspan" in head
        assert "Accept-Encoding: identity" in head


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not reader.at_eof():
        writer.write(b"x")
        try:
            await asyncio.wait_for(reader.read(1), 0.01)
        except TimeoutError:
            continue


async def _endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        await writer.drain()


async def _silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


BAD_ANSWERS = {
    "slow drip": (_drip, {"total_timeout": 0.1}),
    "silence": (_silent, {"total_timeout": 0.05}),
    "endless chunks": (_endless, {"max_bytes": 100_000}),
    "gzip": (response(extra="Content-Encoding: gzip\r\n"), {}),
    "gzip after identity": (response(extra="Content-Encoding: identity\r\nContent-Encoding: gzip\r\n"), {}),
    "gzip as transfer": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", {}),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", {}),
    "part": (response(status="206 Partial Content"), {}),
    "not modified": (response(b"", status="304 Not Modified", extra="Location: /b\r\n"), {}),
    "length larger than the body": (response(length=len(PICTURE) + 1), {}),
    "body over the limit": (response(), {"max_bytes": len(PICTURE) - 1}),
    "body over the limit of the request": (response(), {"max_total_bytes": len(PICTURE) - 1}),
    "unbounded body over the limit": (b"HTTP/1.0 200 OK\r\n\r\n" + PICTURE, {"max_bytes": len(PICTURE) - 1}),
    "not HTTP": (b"220 mail.example ESMTP\r\n", {}),
    "nothing": (b"", {}),
    "huge head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, {}),
    "redirect without a target": (response(b"", status="302 Found"), {}),
    "redirect with two targets": (response(b"", "302 Found", extra="Location: /a\r\nLocation: /b\r\n"), {}),
    "redirect to a private address": (redirect("http://127.0.0.1/"), {}),
    "redirect to a mapped address": (redirect("http://[::ffff:127.0.0.1]/"), {}),
    "redirect to a number": (redirect("http://2130706433/"), {}),
    "redirect to another port": (redirect("http://pictures.example:22/"), {}),
    "redirect with a password": (redirect("http://u:p@pictures.example/"), {}),
    "redirect to a file": (redirect("file:///etc/passwd"), {}),
    "redirect to data": (redirect("data:image/png;base64,QUJD"), {}),
    "redirect with a backslash": (redirect("/\\evil.example/"), {}),
    "redirect with foreign letters": (redirect("/\u00e9"), {}),
}


@pytest.mark.parametrize(("answer", "limits"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_fetch_of_a_bad_answer_fails_with_the_one_message(answer, limits):
    with refused(WHERE, NOT_FETCHED) as caught:
        fetch(answer, response(b"hidden"), **limits)  # a second try or a redirect followed would find this
    assert caught.value.__cause__ is not None
    policy = MediaPolicy(**PATIENT | limits)
    assert str(caught.value) == (
        f"{WHERE}: the image could not be fetched; its URL must answer with status 200 and the image itself, without "
        f"Content-Encoding, in at most {policy.max_bytes} bytes ({policy.max_total_bytes} for all images of the "
        f"request), within {policy.total_timeout:g} seconds for the request"
    )


def test_fetch_from_a_host_that_cannot_be_resolved_fails_with_the_one_message():
    async def unknown(host: str, _: int) -> list[str]:
        raise OSError(f"no such host: {host}")

    with refused("slot[0]", NOT_FETCHED) as caught:
        load("http://a.example/", remote=True, resolver=unknown)
    assert "a.example" not in str(caught.value)


def test_fetch_from_a_name_server_that_does_not_answer_fails_with_the_one_message():
    async def never(_host: str, _port: int) -> list[str]:
        return await asyncio.get_running_loop().create_future()

    with refused("slot[0]", NOT_FETCHED):
        load("http://a.example/", remote=True, resolver=never, total_timeout=0.05)


GOOD_ANSWERS = {
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
    "until the end": (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc"),
    "body longer than its length": (response(b"abcdef", length=3), b"abc"),
    "HTML that says it is an image": (response(b"<html>", extra="Content-Type: image/png\r\n"), b"<html>"),
    "image that says it is text": (response(extra="Content-Type: text/html\r\n"), PICTURE),
    "identity": (response(extra="Content-Encoding: Identity\r\n"), PICTURE),
}


@pytest.mark.parametrize(("answer", "body"), GOOD_ANSWERS.values(), ids=GOOD_ANSWERS.keys())
def test_fetch_of_a_good_answer_gives_its_bytes(answer, body):
    assert fetch(answer, max_bytes=len(body), max_total_bytes=len(body)) == body


def test_fetch_of_an_empty_body_is_refused():
    with refused(WHERE, "the image is empty"):
        fetch(response(b""))


@pytest.mark.parametrize("status", ["301 X", "302 X", "303 X", "307 X", "308 X"])
def test_fetch_of_redirects_up_to_the_limit_gives_the_image(status):
    assert fetch(*[redirect("b/c", status)] * 3, response()) == PICTURE
    with refused(WHERE, NOT_FETCHED):
        fetch(*[redirect("b/c", status)] * 4, response())


def test_fetch_of_a_redirect_resolves_and_checks_the_next_host():
    resolver, backend = Names([PUBLIC], ["10.0.0.1"]), Detour()

    async def run() -> None:
        async with site(response()) as second, site(redirect(f"http://inner.example:{second.port}/")) as first:
            ports = (first.port, second.port)
            async with loader(remote=True, ports=ports, resolver=resolver, backend=backend) as made:
                with refused(WHERE, NOT_FETCHED):
                    await made.load([(WHERE, f"http://outer.example:{first.port}/")])
            assert second.requests == []

    asyncio.run(run())
    assert resolver.asked == ["outer.example", "inner.example"]
    assert backend.hosts == [PUBLIC]


def test_fetch_of_a_redirect_off_the_allow_list_is_refused():
    resolver = Names()

    async def run(target: str) -> list[bytes]:
        async with site(response()) as second, site(redirect(f"http://{target}:{second.port}/")) as first:
            options = {"ports": (first.port, second.port), "domains": ("a.example",), "resolver": resolver}
            async with loader(remote=True, **options) as made:
                return await made.load([(WHERE, f"http://a.example:{first.port}/")])

    assert asyncio.run(run("cdn.a.example")) == [PICTURE]
    with refused(WHERE, NOT_FETCHED):
        asyncio.run(run("b.example"))
    assert resolver.asked == ["a.example", "cdn.a.example", "a.example"]


def test_fetch_after_one_error_of_the_server_or_connection_is_tried_again():
    assert fetch(response(b"", "503 Busy"), response()) == PICTURE
    assert fetch(response(), backend=Detour(httpcore.ConnectError())) == PICTURE


def test_fetch_after_two_errors_of_the_connection_fails():
    backend = Detour(httpcore.ConnectError(), httpcore.ConnectError())
    with refused(WHERE, NOT_FETCHED):
        fetch(response(), backend=backend)
    assert len(backend.hosts) == 2


@pytest.mark.parametrize(("status", "tries"), [("404 Not Found", 1), ("429 Slow Down", 1), ("500 Oops", 2)])
def test_fetch_after_an_error_status_is_tried_as_often_as_it_makes_sense(status, tries):
    async def run() -> int:
        answers = response(b"", status), response(b"", status), response()
        async with site(*answers) as web, loader(remote=True, ports=(web.port,)) as made:
            with refused(WHERE, NOT_FETCHED):
                await made.load([(WHERE, f"http://a.example:{web.port}/")])
            return len(web.requests)

    assert asyncio.run(run()) == tries


# TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for pictures.example and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl to make a certificate")
    made = tmp_path_factory.mktemp("tls")
    command = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test -keyout key -out cert"
    )
    extensions = ["subjectAltName=DNS:pictures.example", "keyUsage=critical,digitalSignature,keyCertSign"]
    options = [part for extension in extensions for part in ("-addext", extension)]
    subprocess.run([program, *command.split(), *options], cwd=made, check=True, capture_output=True)
    return made / "cert", made / "key"


def fetch_tls(certificate: tuple[Path, Path], host: str, *answers: Answer) -> tuple[list[bytes], list[str | None]]:
    """The image at https://host, and the names that clients asked the server for."""
    names: list[str | None] = []
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    server.sni_callback = lambda _socket, name, _context: names.append(name)

    async def run() -> list[bytes]:
        trusted = ssl.create_default_context(cafile=certificate[0])
        async with (
            site(*answers, tls=server) as web,
            loader(remote=True, ports=(web.port,), ssl_context=trusted) as made,
        ):
            return await made.load([(WHERE, f"https://{host}:{web.port}/")])

    return asyncio.run(run()), names


def test_tls_to_a_pinned_address_is_verified_by_name(certificate):
    assert fetch_tls(certificate, "pictures.example", response()) == ([PICTURE], ["pictures.example"])


@pytest.mark.parametrize("host", ["other.example", PUBLIC])
def test_tls_with_a_certificate_of_another_name_fails(certificate, host):
    with refused(WHERE, NOT_FETCHED):
        fetch_tls(certificate, host, response())


def test_tls_redirect_to_plain_http_is_refused(certificate):
    async def run() -> None:
        async with site(response()) as plain:
            policy = MediaPolicy(remote=True, ports=(plain.port,))
            base = read_url(f"https://pictures.example:{plain.port}/", WHERE, policy)
            with refused(WHERE, "must not leave https:"):
                read_url(f"http://pictures.example:{plain.port}/", WHERE, policy, base=base)
            assert read_url("//a.example:443/b", WHERE, MediaPolicy(remote=True), base=base).scheme == "https"

    asyncio.run(run())
    with refused(WHERE, NOT_FETCHED) as caught:
        fetch_tls(certificate, "pictures.example", redirect("http://pictures.example/"))
    assert "must not leave https:" in str(caught.value.__cause__)


def test_tls_by_default_believes_no_unknown_certificate(certificate):
    async def run() -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(*certificate)
        async with site(response(), tls=server) as web:
            policy = MediaPolicy(remote=True, ports=(web.port,), **PATIENT)
            made = MediaLoader(policy, resolver=Names(), backend=Detour())
            with refused(WHERE, NOT_FETCHED):
                await made.load([(WHERE, f"https://pictures.example:{web.port}/")])
            await made.aclose()

    asyncio.run(run())
