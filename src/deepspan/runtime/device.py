"""Which device and dtype a model runs on.

`auto` takes an accelerator that PyTorch reports, otherwise the CPU, and there fp32: on most CPUs bf16 arithmetic is
emulated and slower. Called by `llm`.
"""

import os

import torch

from deepspan.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """Raises ConfigError if the device does not exist here."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise ConfigError(f"device {name!r} cannot be used: it holds no data")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Raises ConfigError for a dtype that is not served."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {' or '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]


def default_cache_bytes(device: torch.device, largest_step: int) -> int:
    """Memory that caches may take unless something else is said.

    An eighth of the machine's on CPUs; a share of what an accelerator has left beside the weights and the largest step
    (bytes).
    """
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    free, _ = torch.accelerator.get_memory_info(device)
    return cache_share(free, largest_step)


def cache_share(free: int, largest_step: int) -> int:
    """Nine tenths of what an accelerator has left: buffers, encoder outputs and its allocator take of the rest."""
    return (free - largest_step) * 9 // 10
