"""A checkpoint folder: which safetensors files it has, which tensors they hold, and lazy access to each.

Files are memory-mapped; nothing is read before it is asked for. Invariants: every stored key is in exactly one file; an
index and its files agree. Used by `weights.load` and by inspection.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspan.errors import WeightsError

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
DESCRIPTION_FILE = "quant_model_description.json"  # says that the weights were exported by ModelSlim
DESCRIBED_STEM = "quant_model_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Header of one stored tensor. dtype: safetensors' name (BF16, F32, F8_E4M3, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """Headers of all files of a folder, and their tensors on demand."""

    def __init__(self, folder: str | Path) -> None:
        """Reads headers only. Raises WeightsError naming the file or tensor that does not fit."""
        self.folder = Path(folder)
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        described = (self.folder / DESCRIPTION_FILE).exists()
        # An export keeps the index of its source beside its own: that one is stale.
        self.index_file = f"{DESCRIBED_STEM}.safetensors.index.json" if described else INDEX_FILE
        index = _read_index(self.folder / self.index_file)
        files = _files(self.folder, index, f"{DESCRIBED_STEM}*.safetensors" if described else None)
        for file in files:
            self._read_header(file)
        if index is not None:
            self._check_against_index(index)
        for file in sorted(set(self.folder.glob("*.safetensors")) - set(files)):
            log.warning("%s is not named by %s and is not read", file.name, self.index_file)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def read(self, key: str, expert: int | None = None, part: int = 0, num_parts: int = 1) -> Tensor:
        """A stored tensor, or the share of one expert in a stacked one; memory-mapped where the library can."""
        handle = self._open[self.tensors[key].file]
        if expert is None:
            return handle.get_tensor(key)
        rows = self.tensors[key].shape[1] // num_parts
        return handle.get_slice(key)[expert, part * rows : (part + 1) * rows].contiguous()

    def _read_header(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="pt")
        except FileNotFoundError:
            raise WeightsError(f"{file.name} is missing from {self.folder}") from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file.name} is not a complete safetensors file: {error}") from None
        self._open[file] = handle
        for key in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
            if key in self.tensors:
                raise WeightsError(f"tensor {key} is in {self.tensors[key].file.name} and again in {file.name}")
            header = handle.get_slice(key)
            self.tensors[key] = StoredTensor(file=file, shape=tuple(header.get_shape()), dtype=header.get_dtype())

    def _check_against_index(self, index: dict[str, str]) -> None:
        for key, name in index.items():
            if key not in self.tensors:
                raise WeightsError(f"{self.index_file} places tensor {key} in {name}, which does not hold it")
            if self.tensors[key].file.name != name:
                raise WeightsError(
                    f"{self.index_file} places tensor {key} in {name}, it is in {self.tensors[key].file.name}"
                )
        for key, stored in self.tensors.items():
            if key not in index:
                raise WeightsError(f"tensor {key} of {stored.file.name} is not in {self.index_file}")


def _read_index(file: Path) -> dict[str, str] | None:
    if not file.exists():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file} is not a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{file}: weight_map must map tensor names to file names")
    return weight_map


def _files(folder: Path, index: dict[str, str] | None, shards: str | None) -> list[Path]:
    """shards: pattern of files that belong together even without an index."""
    if index is not None:
        return [folder / name for name in sorted(set(index.values()))]
    if shards is not None and (files := sorted(folder.glob(shards))):
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"no safetensors files in {folder}")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise WeightsError(f"{folder} has {len(files)} safetensors files ({names}, ...) but no {INDEX_FILE}")
    return files


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype as messages and configuration spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
