"""Fetching images: requests, answers, redirects, limits, TLS."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpcore
import pytest
from media_helpers import (
    NOT_FETCHED,
    PATIENT,
    PICTURE,
    PUBLIC,
    WHERE,
    Answer,
    Detour,
    Names,
    fetch,
    load,
    loader,
    redirect,
    refused,
    response,
    site,
)

from deepspan.server.addresses import read_url
from deepspan.server.media import MediaLoader, MediaPolicy

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
