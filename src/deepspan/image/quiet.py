"""Pillow without its warnings: what matters in them is raised as ImageError, the rest is noise about foreign files.

Owns one process-wide filter. `warnings.catch_warnings` saves and restores a global list, so that two overlapping uses
on two decoding threads would leave the filters of one behind for good; here the first user in puts the filter in place
and the last one out restores. Invariant: only warnings issued by Pillow's own modules are silenced.

Called by `image.decode`.
"""

import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager


class _SharedFilter:
    """Counts its users; the filter is in place while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._saved: warnings.catch_warnings | None = None

    def enter(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL(\..*)?$")
            self._num_users += 1

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._saved is not None:
                self._saved.__exit__(None, None, None)
                self._saved = None


_SHARED = _SharedFilter()


@contextmanager
def quiet_pillow() -> Generator[None]:
    """Silence warnings issued by Pillow's modules; safe on any number of threads at once."""
    _SHARED.enter()
    try:
        yield
    finally:
        _SHARED.leave()
