"""Headers of safetensors files: what is read of right ones, and what is said of all others."""

import json
import random

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepspan.weights.header import MAX_PROBLEMS, read_header

NAME = "model.safetensors"
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.float32),
    "c.scalar": torch.tensor(3, dtype=torch.int64),
    "d.empty": torch.zeros(0, 5),
    "e.scale": torch.zeros(3, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
}
ENTRIES = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]},
}


def write(folder, entries, num_data_bytes=16):
    """A file with this header (JSON or text), and so many bytes of data."""
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    (folder / NAME).write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))
    return folder / NAME


def edited(**changes):
    """ENTRIES with fields of `a` changed."""
    return ENTRIES | {"a": ENTRIES["a"] | changes}


def problems(file):
    return list(read_header(file).problems)


# --- what is right


def test_header_of_a_right_file_has_shapes_dtypes_and_bytes(tmp_path):
    save_file(TENSORS, tmp_path / NAME, metadata={"format": "pt"})
    header = read_header(tmp_path / NAME)
    assert header.problems == ()
    found = {name: (stored.shape, stored.dtype, stored.num_bytes) for name, stored in header.tensors.items()}
    dtypes = {"a.weight": "BF16", "b": "F32", "c.scalar": "I64", "d.empty": "F32", "e.scale": "F8_E8M0"}
    assert found == {name: (tuple(value.shape), dtypes[name], value.nbytes) for name, value in TENSORS.items()}


def test_header_written_by_hand_is_right(tmp_path):
    assert problems(write(tmp_path, ENTRIES)) == []
    assert list(read_header(tmp_path / NAME).tensors) == ["a", "b"]


def test_header_is_read_without_its_data(tmp_path):
    """Fifty gigabytes that are only said to be there: nobody could read them in the time of a test."""
    num_values = 25 * 10**9
    file = write(tmp_path, {"a": {"dtype": "BF16", "shape": [num_values], "data_offsets": [0, 2 * num_values]}}, 0)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + 2 * num_values)
    assert read_header(file).tensors["a"].num_bytes == 50 * 10**9
    assert problems(file) == []


# --- another file in its place


def test_header_of_a_missing_file_says_so(tmp_path):
    assert problems(tmp_path / NAME) == [f"{NAME} is missing from {tmp_path}"]


def test_header_of_a_folder_says_so(tmp_path):
    (tmp_path / NAME).mkdir()
    assert problems(tmp_path / NAME) == [f"{NAME} is not a complete safetensors file: expected a file, found a folder"]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "it has 0 bytes, expected at least 8"),
        (b"\x01\x00\x00", "it has 3 bytes, expected at least 8"),
        (bytes(64), "begins with zeros"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n <html>" + b" " * 400, "a web page"),
        (b"PK\x03\x04" + b"x" * 400, "header length of 8,680,820,738,615,364,432 bytes, expected at most"),
        ((10**6).to_bytes(8, "little") + b"{}", "its header takes 1,000,000 bytes, the file has 10 in all"),
        ((2).to_bytes(8, "little") + b"[]", "its header holds list, expected an object"),
        ((2).to_bytes(8, "little") + b"{]", "its header cannot be read"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "its header cannot be read"),
    ],
)
def test_header_of_something_else_says_what_it_found(tmp_path, data, part):
    (tmp_path / NAME).write_bytes(data)
    (problem,) = problems(tmp_path / NAME)
    assert problem.startswith(f"{NAME} is not a complete safetensors file: ")
    assert part in problem


def test_header_whose_length_looks_like_text_is_read(tmp_path):
    """60 is `<`, which a web page begins with too."""
    file = write(tmp_path, json.dumps({"a": ENTRIES["a"]}, separators=(",", ":")).ljust(60), 8)
    assert file.read_bytes()[:1] == b"<"
    assert problems(file) == []


def test_header_of_a_git_lfs_pointer_says_how_to_get_the_file(tmp_path):
    (tmp_path / NAME).write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\nsize 3580000000\n"
    )
    (problem,) = problems(tmp_path / NAME)
    assert problem.startswith(f"{NAME} is a Git LFS pointer and not the file itself, which has 3,580,000,000 bytes")
    assert "git lfs pull" in problem


# --- entries


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"dtype": "F9"}, 'unknown dtype "F9", expected one of F4, '),
        ({"dtype": None}, "unknown dtype null"),
        ({"dtype": ["F32"]}, 'unknown dtype ["F32"]'),
        ({"shape": [2.0]}, "shape must be a list of sizes, found [2.0]"),
        ({"shape": [-2]}, "shape must be a list of sizes, found [-2]"),
        ({"shape": 2}, "shape must be a list of sizes, found 2"),
        ({"shape": [True]}, "shape must be a list of sizes, found [true]"),
        ({"data_offsets": [8, 0]}, "data_offsets must be a begin and an end, found [8, 0]"),
        ({"data_offsets": [-8, 0]}, "data_offsets must be a begin and an end"),
        ({"data_offsets": [0]}, "data_offsets must be a begin and an end"),
        ({"data_offsets": "0-8"}, "data_offsets must be a begin and an end"),
        ({"data_offsets": [0, 4]}, "F32 of shape [2] takes 8 bytes, its data_offsets [0, 4] span 4"),
        ({"shape": [3]}, "F32 of shape [3] takes 12 bytes, its data_offsets [0, 8] span 8"),
        ({"dtype": "F4", "shape": [3]}, "F4 of shape [3] takes 12 bits, expected whole bytes"),
    ],
)
def test_header_with_a_wrong_entry_names_tensor_and_both_sides(tmp_path, changes, part):
    (problem,) = problems(write(tmp_path, edited(**changes)))
    assert problem.startswith(f"tensor a of {NAME}: ")
    assert part in problem
    assert list(read_header(tmp_path / NAME).tensors) == ["b"]


@pytest.mark.parametrize("entry", [None, 3, [], {}, {"dtype": "F32", "shape": [2]}])
def test_header_with_an_entry_that_is_no_tensor_names_it(tmp_path, entry):
    (problem,) = problems(write(tmp_path, ENTRIES | {"a": entry}))
    assert f"tensor a of {NAME}: expected dtype, shape and data_offsets, found {json.dumps(entry)}" == problem


def test_header_that_names_a_tensor_twice_is_refused_which_the_library_accepts(tmp_path):
    entry = json.dumps(ENTRIES["a"])
    (problem,) = problems(write(tmp_path, f'{{"a": {entry}, "a": {entry}}}', 8))
    assert problem.endswith("it names a twice")
    with safe_open(tmp_path / NAME, "pt") as handle:
        assert list(handle.keys()) == ["a"]


@pytest.mark.parametrize("metadata", [[], {"format": 1}, "pt"])
def test_header_with_wrong_metadata_is_refused(tmp_path, metadata):
    (problem,) = problems(write(tmp_path, {"__metadata__": metadata} | ENTRIES))
    assert problem == f"{NAME}: __metadata__ must map names to texts, found {json.dumps(metadata)}"


# --- data


@pytest.mark.parametrize(
    ("offsets", "parts"),
    [
        ([6, 14], ["tensor b of", "begins at byte 6", "where a ends at 8", "overlap"]),
        ([0, 8], ["tensor b of", "begins at byte 0", "overlap"]),
        ([10, 18], ["tensor b of", "begins at byte 10 of the data, expected 8", "belong to no tensor"]),
    ],
)
def test_header_with_overlaps_or_holes_names_tensors_and_bytes(tmp_path, offsets, parts):
    entries = ENTRIES | {"b": ENTRIES["b"] | {"data_offsets": offsets}}
    (problem,) = problems(write(tmp_path, entries, max(8, offsets[1])))
    assert [part for part in [*parts, NAME] if part not in problem] == []


def test_header_whose_data_does_not_begin_at_its_beginning_is_refused(tmp_path):
    (problem,) = problems(write(tmp_path, {"a": ENTRIES["a"] | {"data_offsets": [4, 12]}}, 12))
    assert "begins at byte 4 of the data, expected 0" in problem


def test_header_of_a_truncated_file_names_the_first_tensor_that_is_cut_off(tmp_path):
    (problem,) = problems(write(tmp_path, ENTRIES, 15))
    assert problem == (
        f"{NAME} is not a complete safetensors file: the header describes 16 bytes of data, the file has 15; "
        "tensor b is cut off first"
    )
    assert list(read_header(tmp_path / NAME).tensors) == ["a", "b"]


def test_header_with_offsets_outside_the_file_names_the_tensor(tmp_path):
    far = 10**15
    entries = ENTRIES | {"b": ENTRIES["b"] | {"data_offsets": [far, far + 8]}}
    hole, cut = problems(write(tmp_path, entries))
    assert "tensor b" in hole
    assert f"describes {far + 8:,} bytes" in cut
    assert "tensor b is cut off first" in cut


def test_header_of_a_file_with_more_data_says_how_much(tmp_path):
    (problem,) = problems(write(tmp_path, ENTRIES, 20))
    assert problem == (
        f"{NAME} has bytes that belong to no tensor: the header describes 16 bytes of data, the file has 20"
    )


def test_header_of_noise_has_a_bounded_number_of_problems(tmp_path):
    found = problems(write(tmp_path, {f"t{i}": {} for i in range(500)}))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == f"400 more problems of {NAME}"


# --- the library


def test_header_without_problems_is_one_that_the_library_opens(tmp_path):
    """Whatever happens to a header: the library accepts no less than we do."""
    rng, file = random.Random(0), tmp_path / NAME
    save_file(TENSORS, file)
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    kinds = {"accepted": 0, "refused": 0}
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2))):
            data[rng.randrange(length)] = rng.choice(b'0123456789,:[]{}" \x00\xff')
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
        found = problems(file)
        kinds["refused" if found else "accepted"] += 1
        try:
            with safe_open(file, "pt") as handle:
                shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            assert found
        else:
            assert found or shapes == {name: stored.shape for name, stored in read_header(file).tensors.items()}
    assert min(kinds.values()) > 20
