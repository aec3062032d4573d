"""Incremental detokeniser: ids as they are generated -> pieces of text.

Owns the bytes of a character that is not complete yet. Invariant: the pieces of `push` and `finish` joined equal
`Tokenizer.decode` of all ids, however they were cut, and no id is decoded twice. What is held back is at most three
bytes, hence at most three ids: a fourth byte completes a character or proves it broken, and then U+FFFD comes out.

One per generated sequence, used by one thread; makes no call to a tokenizer backend.
"""

import codecs
from collections.abc import Iterable

from deepspan.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence, piece by piece. Hidden special ids (`SpecialIds.hidden`) leave no trace."""

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        """keep_special: hidden ids are written as their strings."""
        self._tokenizer = tokenizer
        self._hidden = frozenset() if keep_special else tokenizer.special.hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """New text that `ids` complete; may be empty. Raises InputError for an id outside the vocabulary."""
        new = b"".join(self._tokenizer.bytes_of(token_id) for token_id in ids if token_id not in self._hidden)
        return self._decoder.decode(new)

    def finish(self) -> str:
        """What is still held back, as U+FFFD; the detokeniser then starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
