"""Writing safetensors files: the header first, then each tensor at its place, as soon as it is there.

Invariants: a file has its name only when it is whole; until then it is `NAME.tmp`, which no reader of checkpoints takes
for one. Data is ordered by the size of its numbers, then by name, so that all are aligned and the same tensors give the
same bytes in whatever order they are written. Used by everything that writes checkpoints.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from deepspan.errors import WeightsError
from deepspan.weights.header import DTYPE_BITS, LENGTH_BYTES, StoredTensor, read_header

UNFINISHED = ".tmp"
_ALIGNMENT = 8
_HASHED_AT_ONCE = 1 << 24
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a file says of a tensor that is to be written. dtype: safetensors' name."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | StoredTensor) -> "TensorHeader":
        dtype = tensor.dtype if isinstance(tensor, StoredTensor) else _NAMES[tensor.dtype]
        return cls(dtype=dtype, shape=tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class ShardWriter:
    """One file, written tensor by tensor in any order. Leaving its `with` block unpublished removes what is there."""

    def __init__(self, file: Path, headers: Mapping[str, TensorHeader]) -> None:
        """headers: of all tensors that will be written. Raises OSError."""
        self.file, self._headers = file, headers
        self._unfinished = file.with_name(file.name + UNFINISHED)
        self._header, self._places = _layout(headers)
        self._digests: dict[str, bytes] = {}
        self._stream = self._unfinished.open("wb")
        self._stream.write(self._header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Any device; not changed. Raises OSError."""
        assert name not in self._digests, f"{name} is written twice"
        found = TensorHeader.of(tensor)
        assert found == self._headers[name], f"{name}: planned {self._headers[name]}, written {found}"
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        self._digests[name] = hashlib.sha256(data).digest()
        self._stream.seek(self._places[name])
        self._stream.write(data)

    def seal(self) -> str:
        """Bring the file to disk; still under its temporary name. Its digest, as `digest_of` finds it again."""
        assert self._digests.keys() == self._headers.keys(), "not everything was written"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return _combined(self._header, [self._digests[name] for name in self._places])

    def publish(self) -> None:
        """Give the file its name."""
        assert self._digests.keys() == self._headers.keys(), "not everything was written"
        self._stream.close()
        self._unfinished.replace(self.file)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._stream.closed:
            self._stream.close()
            self._unfinished.unlink(missing_ok=True)


def file_bytes(headers: Mapping[str, TensorHeader]) -> int:
    """Size of the file that holds these tensors."""
    return len(_layout(headers)[0]) + sum(header.num_bytes for header in headers.values())


def _layout(headers: Mapping[str, TensorHeader]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and where in the file each tensor begins, in that order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = dict[str, int](), 0
    for name in sorted(headers, key=lambda name: (-DTYPE_BITS[headers[name].dtype], name)):
        header = headers[name]
        begins[name], end = end, end + header.num_bytes
        entries[name] = {"dtype": header.dtype, "shape": header.shape, "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return whole, {name: len(whole) + begin for name, begin in begins.items()}


def digest_of(file: Path) -> str:
    """Of a whole file, header included. Raises WeightsError naming what is wrong with its header."""
    header = read_header(file)
    if header.problems:
        raise WeightsError(header.problems[0])
    num_data_bytes = sum(stored.num_bytes for stored in header.tensors.values())
    with file.open("rb") as stream:
        start = stream.read(file.stat().st_size - num_data_bytes)
        digests = []
        for stored in header.tensors.values():
            digest, left = hashlib.sha256(), stored.num_bytes
            while left and (data := stream.read(min(left, _HASHED_AT_ONCE))):
                digest.update(data)
                left -= len(data)
            digests.append(digest.digest())
    return _combined(start, digests)


def _combined(header: bytes, digests: list[bytes]) -> str:
    return hashlib.sha256(header + b"".join(digests)).hexdigest()


# --- whole files of what is in memory


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of these tensors."""
    with ShardWriter(file, {name: TensorHeader.of(tensor) for name, tensor in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.publish()


def write_index(file: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """weight_map: tensor name -> file name. total_size: bytes of all data."""
    write_json(file, {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)})


def write_json(file: Path, value: object, *, durable: bool = False) -> None:
    """Replaces the file as a whole. durable: it is on disk when this returns."""
    write_text(file, json.dumps(value, indent=2) + "\n", durable=durable)


def write_text(file: Path, text: str, *, durable: bool = False) -> None:
    unfinished = file.with_name(file.name + UNFINISHED)
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    unfinished.replace(file)
    if durable:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names of files to disk, where the system has such a call."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
