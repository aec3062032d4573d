"""Where images may be fetched from: written URLs, names, addresses."""

import asyncio
import ssl
from ipaddress import ip_address

import httpcore
import httpx
import pytest
from media_helpers import (
    NOT_FETCHED,
    PATIENT,
    PICTURE,
    PUBLIC,
    WHERE,
    Detour,
    Names,
    fetch,
    load,
    refused,
    response,
    site,
)

from deepspan.errors import ConfigError
from deepspan.server.addresses import SystemResolver, is_public, read_url
from deepspan.server.media import MediaLoader, MediaPolicy

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
