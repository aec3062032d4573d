"""How fast the files of a checkpoint come from where they are: what loading takes at least.

Measured on samples of the files themselves, after the system was asked to forget them, since a copy in memory says
nothing about the disk. Called by `deepspan inspect memory`.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE_BYTES = 64 << 20  # of one file
MAX_SAMPLES = 4
LEAST_BYTES = 1 << 20  # a shorter read is all latency


def read_speed(files: Sequence[Path]) -> float | None:
    """Bytes a second, from the middles of the largest files; None if they are too small, or cannot be forgotten."""
    if not hasattr(os, "posix_fadvise"):
        return None
    largest = sorted(files, key=lambda file: file.stat().st_size)[-MAX_SAMPLES:]
    found = [_read_cold(file) for file in largest]
    num_bytes, seconds = sum(size for size, _ in found), sum(took for _, took in found)
    return num_bytes / seconds if num_bytes >= LEAST_BYTES and seconds > 0 else None


def _read_cold(file: Path) -> tuple[int, float]:
    """Bytes that were read, and the seconds it took."""
    with file.open("rb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        count = min(size, SAMPLE_BYTES)
        start = (size - count) // 2
        os.posix_fadvise(stream.fileno(), start, count, os.POSIX_FADV_DONTNEED)
        stream.seek(start)
        begun, left = time.perf_counter(), count
        while left and (data := stream.read(min(left, LEAST_BYTES))):
            left -= len(data)
        return count - left, time.perf_counter() - begun
