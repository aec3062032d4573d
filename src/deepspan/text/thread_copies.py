"""One copy of an object per thread, for objects that must not be used by two threads at once.

Owns the copies; the source itself is only ever copied, never called. A copy is made when a thread first asks, is tied
to the source object it was made from, and is made anew once the source is replaced. A later mutation of a source is
not seen by existing copies. Used by `text.tokenizer`.
"""

import copy
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadCopies(Generic[T]):
    """Hands each thread its own deep copy of `source`."""

    def __init__(self, source: T) -> None:
        self._source = source
        self._local = threading.local()
        self._copying = threading.Lock()

    def get(self) -> T:
        """This thread's copy of the present source."""
        source = self._source
        made = getattr(self._local, "made", None)
        # The source is kept beside its copy: identity is safe only while the object lives, as ids are used again.
        if made is None or made[0] is not source:
            with self._copying:
                made = (source, copy.deepcopy(source))
            self._local.made = made
        return made[1]

    def replace(self, source: T) -> None:
        """Let every thread make a new copy, from `source`, when it next asks."""
        self._source = source
