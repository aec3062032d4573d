"""Which images have encoder output at hand: by content, counted in rows, kept until the room is needed.

An output does not depend on where its image stands, so one entry serves every request and every place. Invariants: an
image that a running request still has to compute is not dropped; the rows of all entries never exceed the capacity.
Owned by the scheduler; the runtime holds the tensors under the same digests and drops those named by `take_dropped`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    num_rows: int
    holders: set[int] = field(default_factory=set)


class EncoderCache:
    """Entries in order of last use."""

    def __init__(self, capacity: int) -> None:
        """capacity: rows."""
        self.capacity = capacity
        self.num_rows = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._dropped: list[str] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def hold(self, digest: str, holder: int) -> None:
        """Keep an entry until the holder drops it."""
        self._entries[digest].holders.add(holder)
        self._entries.move_to_end(digest)

    def reserve(self, digest: str, num_rows: int, holder: int) -> bool:
        """Make room for an image about to be encoded, and hold it; False if what is held leaves too little."""
        assert digest not in self._entries, "the image is there already"
        held = sum(entry.num_rows for entry in self._entries.values() if entry.holders)
        if held + num_rows > self.capacity:
            return False
        for old in [digest for digest, entry in self._entries.items() if not entry.holders]:
            if self.num_rows + num_rows <= self.capacity:
                break
            self.forget(old)
        self._entries[digest] = _Entry(num_rows, {holder})
        self.num_rows += num_rows
        return True

    def drop(self, digest: str, holder: int) -> None:
        """The holder needs the entry no longer; it stays as long as there is room."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.holders.discard(holder)

    def forget(self, digest: str) -> None:
        """Remove an entry, held or not (its encoding failed)."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.num_rows -= entry.num_rows
            self._dropped.append(digest)

    def take_dropped(self) -> tuple[str, ...]:
        """Digests removed since the last call, whose tensors can go."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def check(self, holders: set[int]) -> None:
        """Prove that the counts add up and that only the given requests hold anything."""
        assert self.num_rows == sum(entry.num_rows for entry in self._entries.values()) <= self.capacity
        assert all(entry.holders <= holders for entry in self._entries.values()), "held by a request that is gone"
