"""Stop strings in text that comes piece by piece.

Owns the text that might be the beginning of a stop string: it is held back until that is decided. Invariant: what
`push` gave out and `finish` joined is the text up to the first stop string, however the pieces were cut.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """stops: none of them empty. keep: the string that ends the text belongs to it."""
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """New text; returns what can be given out. After a stop string is found, nothing more is."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            # The first to be complete ends the text; of those, the one that begins first.
            start, stop = min(places, key=lambda found: (found[0] + len(found[1]), found[0]))
            end = start + len(stop) if self._keep else start
            self.found, out, self._held = stop, self._held[:end], ""
            return out
        keep = max(self._overlap(stop) for stop in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """What is still held back: the text is at its end without a stop string."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins the stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
