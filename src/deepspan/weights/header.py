"""The header of one safetensors file, read strictly: what it holds, and everything that is wrong with it.

A file is 8 bytes (length of the header, little-endian), a JSON header (name -> dtype, shape, data_offsets), and the
data. Invariant: a file without problems is one whose tensors fill its data to the last byte, without holes or overlaps.
Only the header and the size of the file are read, so a checkpoint of any size is judged in seconds. No torch, no
safetensors: their messages name neither file nor tensor. Used by `weights.folder`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Bits of one value of every dtype that the format knows.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_PROBLEMS = 100  # of one file: a header of noise has one for each of its entries
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/.*?^size (\d+)", re.DOTALL | re.MULTILINE)
START_BYTES = 1024  # enough for a pointer file, and to tell text from a header


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Header of one stored tensor. dtype: safetensors' name (BF16, F32, F8_E4M3, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """tensors: those that are described without fault, in the order of their data. problems: one message each."""

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


class _FaultError(Exception):
    """What is wrong with a file or an entry; the message is for the user."""


def read_header(file: Path) -> Header:
    """Header of a file, read as far as it can be. Never raises: whatever is wrong is a problem that names the file."""
    try:
        entries, num_data_bytes = _read_entries(file)
    except _FaultError as fault:
        return Header(problems=(str(fault),))
    return _described(file, entries, num_data_bytes)


def lfs_problem(name: str, start: bytes) -> str | None:
    """Message if a file begins as a Git LFS pointer does: what stands where the real file was never fetched."""
    if (pointer := _LFS.match(start)) is None:
        return None
    return (
        f"{name} is a Git LFS pointer and not the file itself, which has {int(pointer[1]):,} bytes; "
        "fetch it with `git lfs pull`, or download it again"
    )


def _read_entries(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON object of the header, and how many bytes the file has behind it."""
    broken = f"{file.name} is not a complete safetensors file"
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise _FaultError(f"{broken}: expected a file, found a folder")
        with file.open("rb") as stream:
            start = stream.read(START_BYTES)
            if problem := lfs_problem(file.name, start):
                raise _FaultError(problem)
            try:
                length = _header_length(start, size)
            except _FaultError as fault:
                raise _FaultError(f"{broken}: {fault}") from None
            stream.seek(LENGTH_BYTES)
            text = stream.read(length)
    except FileNotFoundError:
        raise _FaultError(f"{file.name} is missing from {file.parent}") from None
    except OSError as error:
        raise _FaultError(f"{file.name} cannot be read: {error.strerror}") from None
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"{broken}: its header cannot be read: {error}") from None
    if not isinstance(entries, dict):
        raise _FaultError(f"{broken}: its header holds {type(entries).__name__}, expected an object")
    return entries, size - LENGTH_BYTES - length


def _header_length(start: bytes, size: int) -> int:
    """start: first bytes of a file of `size` bytes."""
    if size < LENGTH_BYTES:
        raise _FaultError(f"it has {size} bytes, expected at least {LENGTH_BYTES}")
    if not any(start):
        raise _FaultError("it begins with zeros, as a file does whose download has only reserved its place")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        return length
    if start.lstrip()[:1] == b"<":  # asked only now: "<" is a length that a small header may well have
        raise _FaultError("it is a web page, probably the answer to a download that failed")
    if length > MAX_HEADER_BYTES:
        raise _FaultError(f"it begins with a header length of {length:,} bytes, expected at most {MAX_HEADER_BYTES:,}")
    raise _FaultError(f"its header takes {length:,} bytes, the file has {size:,} in all")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice} twice")
    return found


def _described(file: Path, entries: dict[str, Any], num_data_bytes: int) -> Header:
    """Tensors of a header's entries. num_data_bytes: what the file has behind its header."""
    problems: list[str] = []
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        problems.append(f"{file.name}: __metadata__ must map names to texts, found {_short(metadata)}")
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        try:
            tensors[name] = _stored(file, entry)
        except _FaultError as fault:
            problems.append(f"tensor {name} of {file.name}: {fault}")
        else:
            ranges.append((*entry["data_offsets"], name))
    ranges.sort()
    tensors = {name: tensors[name] for _, _, name in ranges}
    if len(tensors) == len(entries):  # otherwise the rest would be named as holes
        problems += _range_problems(file, ranges, num_data_bytes)
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"{len(problems) - MAX_PROBLEMS} more problems of {file.name}"]
    return Header(tensors=tensors, problems=tuple(problems))


def _stored(file: Path, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise _FaultError(f"expected dtype, shape and data_offsets, found {_short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _FaultError(f"unknown dtype {_short(dtype)}, expected one of {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape):
        raise _FaultError(f"shape must be a list of sizes, found {_short(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _FaultError(f"data_offsets must be a begin and an end, found {_short(offsets)}")
    bits, found = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if bits % 8:
        raise _FaultError(f"{dtype} of shape {shape} takes {bits} bits, expected whole bytes")
    if bits != 8 * found:
        raise _FaultError(
            f"{dtype} of shape {shape} takes {bits // 8:,} bytes, its data_offsets {offsets} span {found:,}"
        )
    return StoredTensor(file=file, shape=tuple(shape), dtype=dtype)


def _range_problems(file: Path, ranges: Iterable[tuple[int, int, str]], num_data_bytes: int) -> list[str]:
    """Messages about overlaps, holes, data that is cut off and data that nobody owns. ranges: sorted."""
    problems: list[str] = []
    reached, last, first_cut = 0, "", ""
    for begin, end, name in ranges:
        if begin < reached:
            problems.append(
                f"tensor {name} of {file.name} begins at byte {begin:,} of the data, where {last} ends at {reached:,}: "
                "they overlap"
            )
        elif begin > reached:
            problems.append(
                f"tensor {name} of {file.name} begins at byte {begin:,} of the data, expected {reached:,}: the bytes "
                "between belong to no tensor"
            )
        if end > num_data_bytes and not first_cut:
            first_cut = name
        if end >= reached:
            reached, last = end, name
    whole = f"the header describes {reached:,} bytes of data, the file has {num_data_bytes:,}"
    if first_cut:
        problems.append(f"{file.name} is not a complete safetensors file: {whole}; tensor {first_cut} is cut off first")
    elif reached < num_data_bytes:
        problems.append(f"{file.name} has bytes that belong to no tensor: {whole}")
    return problems


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
