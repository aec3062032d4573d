"""The folder that a conversion writes: what may be in it, which files are finished, and what lets it go on later.

A journal in the folder says what is being written and lists finished files with their digests. It is written before
anything else and removed when all is done, so a folder with a journal is unfinished, and one without is not ours to
touch. Invariants: a file counts as finished if it is recorded and its bytes still have the recorded digest; one process
at a time. Called by `weights.convert`.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepspan.errors import WeightsError
from deepspan.weights.writer import UNFINISHED, digest_of, sync_folder, write_json

try:
    import fcntl
except ImportError:  # a system without it has no such locks; conversions there must not be started twice
    fcntl = None

JOURNAL = ".deepspan-convert.json"
MAX_NAMES_IN_MESSAGE = 3
MAX_SHOWN = 40  # characters of a value in a message

Identity = Mapping[str, Any]


class Journal:
    """Of one conversion. identity: whatever must be the same for a later run to go on with it."""

    def __init__(self, folder: Path, identity: Identity, known: Iterable[str]) -> None:
        """known: names that the conversion writes. Nothing is written yet.

        Raises WeightsError if the folder holds anything else, or a conversion with another identity.
        """
        self.folder, self.identity = folder, dict(identity)
        self.finished: dict[str, str] = {}
        found = read_journal(folder)
        if found is None:
            strangers = [name for name in _entries(folder) if name != JOURNAL + UNFINISHED]
            _refuse(folder, strangers, "it is not empty")
            return
        for name, value in self.identity.items():
            if (there := found["identity"].get(name)) != value:
                raise WeightsError(
                    f"{folder} holds an unfinished conversion with another {name}{_both(there, value)}; remove the "
                    "folder, or choose another"
                )
        known = {JOURNAL, *known}
        strangers = [name for name in _entries(folder) if name.removesuffix(UNFINISHED) not in known]
        _refuse(folder, strangers, "beside an unfinished conversion it holds something else")
        self.finished = found["finished"]

    def verify(self, files: Iterable[str], checked: Callable[[str], None] = lambda name: None) -> set[str]:
        """Those of the files that are finished and still as they were written; others are forgotten.

        checked: called with each that is good, since reading all of them takes a while.
        """
        good = set()
        for name in files:
            if name in self.finished and self._is_whole(name):
                good.add(name)
                checked(name)
        self.finished = {name: digest for name, digest in self.finished.items() if name in good}
        return good

    def begin(self) -> None:
        """Say in the folder what will be in it, and remove what is not finished. Raises OSError."""
        self._write()
        for file in self._unfinished():
            file.unlink()

    def reclaimed(self) -> int:
        """Bytes that `begin` makes free."""
        return sum(file.stat().st_size for file in self._unfinished())

    def record(self, name: str, digest: str) -> None:
        """To be called before a file gets its name: one that has it without a record is written again."""
        self.finished[name] = digest
        self._write()

    def end(self) -> None:
        (self.folder / JOURNAL).unlink()
        sync_folder(self.folder)

    def _unfinished(self) -> list[Path]:
        kept = {JOURNAL, *self.finished}
        return [file for file in self.folder.glob("*") if file.is_file() and file.name not in kept]

    def _write(self) -> None:
        value = {"identity": self.identity, "finished": self.finished}
        write_json(self.folder / JOURNAL, value, durable=True)

    def _is_whole(self, name: str) -> bool:
        try:
            return digest_of(self.folder / name) == self.finished[name]
        except (WeightsError, OSError):
            return False


def read_journal(folder: Path) -> dict[str, Any] | None:
    """What a folder's journal holds, or None without one. Raises WeightsError if it cannot be read."""
    file = folder / JOURNAL
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}; remove {folder}, or choose another folder") from None
    parts = [found.get(name) for name in ("identity", "finished")] if isinstance(found, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise WeightsError(f"{file} is no journal of a conversion; remove {folder}, or choose another folder")
    return found


def source_digest(folder: Path) -> str:
    """Changes whenever a file of the folder does: names, sizes and times of change of all of them."""
    found = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    text = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in found])
    return hashlib.sha256(text.encode()).hexdigest()


def check_room(folder: Path, needed: int, reclaimed: int = 0) -> None:
    """Raises WeightsError with the numbers if a disk has not `needed` bytes of room. reclaimed: what is made free."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free + reclaimed
    if free < needed:
        raise WeightsError(
            f"{folder} needs {needed:,} more bytes ({needed / 1e9:,.1f} GB), its disk has {free:,} free; nothing was "
            "written"
        )


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other conversions out of an existing folder while the block runs. Raises WeightsError if one is in it."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeightsError(f"{folder} is being written by another conversion") from None
        yield
    finally:
        os.close(descriptor)


def _both(there: Any, now: Any) -> str:
    """Two values in a message, unless one is a digest or a list, which says nothing to a reader."""
    return "" if max(len(str(there)), len(str(now))) > MAX_SHOWN else f" ({there!r} there, {now!r} now)"


def _entries(folder: Path) -> list[str]:
    if folder.exists() and not folder.is_dir():
        raise WeightsError(f"{folder} is a file, expected a folder to write; nothing was written")
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def _refuse(folder: Path, names: list[str], why: str) -> None:
    if names:
        more = len(names) - MAX_NAMES_IN_MESSAGE
        shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
        raise WeightsError(f"{folder} cannot be written to: {why} ({shown}); nothing was written")
