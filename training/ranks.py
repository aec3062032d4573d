"""Data-parallel training on one machine: a process per core, gradients averaged after each backward pass.

Two processes of one thread do more than one of two threads here: the operations are small, and threads wait for each
other at every one of them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among its peers; alone, every method does nothing."""

    rank: int = 0
    size: int = 1

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mean over ranks. A parameter that no rank used keeps no gradient, so that no optimiser moves it."""
        if self.size == 1:
            return
        every = list(parameters)
        used = torch.tensor([float(parameter.grad is not None) for parameter in every])
        dist.all_reduce(used, dist.ReduceOp.MAX)
        shared = [parameter for parameter, flag in zip(every, used.tolist(), strict=True) if flag]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in shared])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        parts = flat.div_(self.size).split([parameter.numel() for parameter in shared])
        for parameter, part in zip(shared, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over ranks; every rank gives tensors of the same shapes, or none of them any."""
        if self.size == 1 or not tensors:
            return list(tensors)
        total = torch.stack(list(tensors))
        dist.all_reduce(total)
        return list(total)

    def agree(self, flag: bool) -> bool:
        """What rank 0 says."""
        if self.size == 1:
            return flag
        decision = torch.tensor([int(flag)])
        dist.broadcast(decision, 0)
        return bool(decision.item())


def launch(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(ranks, *arguments)` in `size` processes that share the cores; in this process if size is 1."""
    if size == 1:
        work(Ranks(), *arguments)
        return
    threads = max(1, (os.cpu_count() or 1) // size)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        torch.multiprocessing.spawn(_start, (size, threads, store, work, arguments), nprocs=size)


def _start(rank: int, size: int, threads: int, store: str, work: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        work(Ranks(rank=rank, size=size), *arguments)
    finally:
        dist.destroy_process_group()
