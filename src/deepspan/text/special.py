"""Special tokens of the model: their strings and, resolved once from a tokenizer's vocabulary, their ids.

Owns every special string of the text side, and the only base constant of the image span ids. Bars are U+FF5C and the
low block is U+2581, except in the five span placeholders, which use ASCII bars. Look-alikes are plain text.
Invariants of `SpecialIds`: each id is an exact entry of the vocabulary (never what a tokenizer answers for an unknown
string), no two names share an id, and the five span ids are consecutive in the order of `TokenKind`.

Called by `text.chat` (strings), `text.tokenizer` (ids), and whoever must know a token's kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from deepspan.core.media import TokenKind
from deepspan.errors import ConfigError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"  # the angle brackets and names around it are ordinary text
LATEST_REMINDER = "<｜latest_reminder｜>"
FIM_HOLE = "<｜fim▁hole｜>"
FIM_BEGIN = "<｜fim▁begin｜>"
FIM_END = "<｜fim▁end｜>"
TASKS: Mapping[str, str] = MappingProxyType(
    {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
)
SPANS = tuple(f"<|place_holder_mm_span_{number:04d}|>" for number in range(431, 436))  # in the order of TokenKind 0..4
IMAGE = "<｜deepseek_image｜>"

# The public text tokenizer spells the image slot differently. That spelling is trusted at this one id only: elsewhere
# the string could be any grounding tag of another vocabulary.
PUBLIC_IMAGE = "<｜image2｜>"
PUBLIC_IMAGE_ID = 129264

GRAMMAR = (
    *(BOS, EOS, PAD, FIM_HOLE, FIM_BEGIN, FIM_END, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML, LATEST_REMINDER),
    *TASKS.values(),
)
HIDDEN = (BOS, EOS, PAD, USER, ASSISTANT, *SPANS, IMAGE)  # what never appears as generated text


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids of the special tokens of one vocabulary.

    grammar: id of every string of `GRAMMAR`.
    hidden: ids that are dropped from generated text; think tags and DSML are not among them, a parser needs them.
    sentinel_base: id of the first span placeholder; a sentinel id is `sentinel_base + TokenKind`. None without vision.
    image: id that stands once per image before expansion; it is text to `kind_of`. None without vision.
    """

    grammar: Mapping[str, int]
    hidden: frozenset[int]
    sentinel_base: int | None
    image: int | None

    @classmethod
    def resolve(cls, vocab: Mapping[str, int], *, vision: bool) -> "SpecialIds":
        """Look every special string up in `vocab` (string -> id, added tokens included).

        Raises ConfigError, naming the token, if a string is no exact entry, if two strings share an id, or if the span
        ids are not consecutive. Span and image tokens are required with `vision` only.
        """
        grammar = {string: _exact_id(vocab, string) for string in GRAMMAR}
        _check_distinct(grammar)
        image, base = None, None
        hidden = {vocab[string] for string in HIDDEN if string in vocab}
        if vision:
            spans = {string: _exact_id(vocab, string) for string in SPANS}
            base = _consecutive_base(spans)
            image = _image_id(vocab)
            _check_distinct(grammar | spans | {IMAGE: image})
            hidden.add(image)
        return cls(grammar=MappingProxyType(grammar), hidden=frozenset(hidden), sentinel_base=base, image=image)

    @property
    def bos(self) -> int:
        return self.grammar[BOS]

    @property
    def eos(self) -> int:
        return self.grammar[EOS]

    @property
    def pad(self) -> int:
        return self.grammar[PAD]

    @property
    def user(self) -> int:
        return self.grammar[USER]

    @property
    def assistant(self) -> int:
        return self.grammar[ASSISTANT]

    @property
    def think_open(self) -> int:
        return self.grammar[THINK_OPEN]

    @property
    def think_close(self) -> int:
        return self.grammar[THINK_CLOSE]

    @property
    def dsml(self) -> int:
        return self.grammar[DSML]

    def is_sentinel(self, token_id: int) -> bool:
        """Whether `token_id` is one of the five ids that stand for rows of an image."""
        return self.sentinel_base is not None and self.sentinel_base <= token_id < self.sentinel_base + len(SPANS)

    def kind_of(self, token_id: int) -> TokenKind:
        """Kind of one token of an expanded prompt; every id outside the five sentinels is text."""
        if self.sentinel_base is None or not self.is_sentinel(token_id):
            return TokenKind.TEXT
        return TokenKind(token_id - self.sentinel_base)


def open_turn(token_ids: Sequence[int] | np.ndarray, special: SpecialIds) -> list[int]:
    """The end of a prompt from the think tag under which its output begins; empty if the output continues no turn.

    A closing tag counts before an opening one: behind it stands the answer.
    """
    ids = np.asarray(token_ids)
    headers = np.flatnonzero(ids == special.assistant)
    tail = ids[headers[-1] + 1 :].tolist() if len(headers) else []
    if not tail or tail[0] not in (special.think_open, special.think_close) or special.eos in tail:
        return []
    return tail[tail.index(special.think_close) :] if special.think_close in tail else tail


def _exact_id(vocab: Mapping[str, int], string: str) -> int:
    # Membership is asked first: a mapping may answer an unknown string with a fallback id.
    if string not in vocab:
        raise ConfigError(f"the tokenizer has no token {string}")
    return vocab[string]


def _image_id(vocab: Mapping[str, int]) -> int:
    if IMAGE in vocab:
        return vocab[IMAGE]
    if PUBLIC_IMAGE in vocab and vocab[PUBLIC_IMAGE] == PUBLIC_IMAGE_ID:
        return PUBLIC_IMAGE_ID
    raise ConfigError(f"the tokenizer has no token {IMAGE} (nor {PUBLIC_IMAGE} at id {PUBLIC_IMAGE_ID})")


def _consecutive_base(spans: Mapping[str, int]) -> int:
    base = spans[SPANS[0]]
    for offset, string in enumerate(SPANS):
        if spans[string] != base + offset:
            raise ConfigError(
                f"span placeholders need consecutive ids: {string} is {spans[string]}, not {base + offset}"
            )
    return base


def _check_distinct(ids: Mapping[str, int]) -> None:
    # A shared id is how an unknown-token fallback shows itself.
    owner: dict[int, str] = {}
    for string, token_id in ids.items():
        if (other := owner.setdefault(token_id, string)) != string:
            raise ConfigError(f"the tokens {other} and {string} share the id {token_id}")
