"""What every benchmark does: say on what it ran, and write its results down."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspan import __version__


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "deepspan": __version__,
    }
    if "torch" in sys.modules:
        import torch

        facts |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return facts


def best_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Shortest wall time in seconds: the least disturbed one."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def options(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="JSON file to write; printed otherwise")
    return parser


def write(name: str, results: dict[str, Any], out: Path | None) -> None:
    """One JSON document: name, machine, results."""
    text = json.dumps({"benchmark": name, "machine": machine(), "results": results}, indent=2)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
