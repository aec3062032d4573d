"""Progress on stderr: one bar that counts and vanishes, and the console for remarks beside the answer."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

notes = Console(stderr=True, highlight=False)


@contextmanager
def counting(label: str, unit: str) -> Generator[Callable[[int, int], None]]:
    """A bar while the block runs; what it yields is called with (done, total)."""
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
