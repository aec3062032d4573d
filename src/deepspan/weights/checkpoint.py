"""A checkpoint folder: which safetensors files it has, which tensors they hold, and lazy access to each.

Files are memory-mapped; nothing is read before it is asked for. Invariant: no tensor can be asked for before the
headers of all files were found right and in agreement (`weights.folder`). Used by `weights.load`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspan.errors import WeightsError
from deepspan.weights.folder import DESCRIBED_STEM, DESCRIPTION_FILE, INDEX_FILE, Headers
from deepspan.weights.header import StoredTensor

__all__ = [
    "DESCRIBED_STEM",
    "DESCRIPTION_FILE",
    "INDEX_FILE",
    "Checkpoint",
    "StoredTensor",
    "torch_dtype_name",
]


class Checkpoint(Headers):
    """Headers of all files of a folder, and their tensors on demand."""

    def __init__(self, folder: str | Path) -> None:
        """Reads headers only. Raises WeightsError naming the files and tensors that do not fit."""
        super().__init__(folder)
        self.require()
        self._open: dict[Path, Any] = {file: _opened(file) for file in self.files}

    def read(self, key: str, expert: int | None = None, part: int = 0, num_parts: int = 1) -> Tensor:
        """A stored tensor, or the share of one expert in a stacked one; memory-mapped where the library can."""
        file = self.tensors[key].file
        if file not in self._open:
            self._open[file] = _opened(file)
        handle = self._open[file]
        if expert is None:
            return handle.get_tensor(key)
        rows = self.tensors[key].shape[1] // num_parts
        return handle.get_slice(key)[expert, part * rows : (part + 1) * rows].contiguous()

    def forget(self) -> None:
        """Let go of the mapped files, to be mapped anew when they are read: what was read of them is memory until then.

        Tensors that were given out keep the mapping they came from.
        """
        self._open.clear()


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:  # a limit of the library that our reader of headers does not have
        raise WeightsError(f"{file.name} cannot be opened: {error}") from None


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype as messages and configuration spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
