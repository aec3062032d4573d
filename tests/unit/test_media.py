"""Images by address: files of the operator, limits of a request, addresses that are refused."""

import asyncio
import os
from pathlib import Path

import pytest
from media_helpers import (
    NOT_FETCHED,
    PADDED,
    PICTURE,
    PUBLIC,
    Detour,
    Names,
    data,
    load,
    loader,
    refused,
    response,
    site,
)

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
