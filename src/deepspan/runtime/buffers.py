"""Buffers that exist once: written on the host, read on the device, at the same address in every step.

On CPU both sides are one memory. Elsewhere the host side is pinned and copied without waiting. Used by `step_builder`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Buffer:
    """host: integer array to write to. device: the tensor that a forward pass reads."""

    def __init__(self, shape: int | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        staged = torch.zeros(shape, dtype=dtype, pin_memory=device.type not in ("cpu", "meta"))
        self.host = staged.numpy()
        self._staged = staged
        self.device = staged if device.type == "cpu" else torch.zeros_like(staged, device=device)

    @property
    def num_bytes(self) -> int:
        """Of the device's side."""
        return self.device.nbytes

    def upload(self, count: int) -> Tensor:
        """The first `count` elements, as they are on the host now."""
        if self.device is not self._staged:
            self.device[:count].copy_(self._staged[:count], non_blocking=True)
        return self.device[:count]

    def upload_row(self, row: int) -> None:
        """One row of a table."""
        if self.device is not self._staged:
            self.device[row].copy_(self._staged[row], non_blocking=True)

    def fill_whole(self, values: Sequence[int]) -> Tensor:
        """Values at the start and zeros behind: what an earlier, larger step left must not count."""
        self.host[:] = 0
        self.host[: len(values)] = values
        return self.upload(len(self.host))

    def fill(self, values: np.ndarray) -> Tensor:
        """Write values at the start and upload them. Raises AssertionError if there are too many."""
        assert len(values) <= len(self.host), f"{len(values)} values for a buffer of {len(self.host)}"
        self.host[: len(values)] = values
        return self.upload(len(values))
