"""Progress on stderr: one bar that counts and vanishes, and the console for remarks beside the answer."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

notes = Console(stderr=True, highlight=False)


def counting(label: str, unit: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A bar while the block runs; what it yields is called with (done, total)."""
    return _bar(TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())


def counting_bytes(label: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """The same for bytes, with how fast it goes and how long it will take."""
    return _bar(TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


@contextmanager
def _bar(*columns: ProgressColumn) -> Generator[Callable[[int, int], None]]:
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
