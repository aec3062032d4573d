"""Tags of DSML in generated text, tolerantly recognised while they are still arriving.

Text here carries the special tokens that matter as lone surrogates, which decoded text can never hold: so a tag is a
tag only where the model generated the token, and text that merely looks like one is text. Called by `text.parser`.
"""

import re
from dataclasses import dataclass
from typing import Literal

from deepspan.text import special

BAR, THINK_OPEN, THINK_CLOSE = "\ud800", "\ud801", "\ud802"
SPELLINGS = {BAR: special.DSML, THINK_OPEN: special.THINK_OPEN, THINK_CLOSE: special.THINK_CLOSE}

BLOCK_NAMES = ("tool_calls", "toolcalls", "tool_call", "function_calls", "tool")
NAMES = (*BLOCK_NAMES, "invoke", "parameter")
MAX_TAG = 1024  # a tag that gets longer is text

_BARS = f"[｜{BAR}]*{BAR}[｜{BAR}]*"
# Neither the special token nor a line break stands in a quoted name: an unclosed quote must not swallow what follows.
_QUOTED = "|".join(f"{left}[^{right}\n{BAR}]*{right}" for left, right in ('""', "''", "“”", "‘’"))
_QUOTE_OPEN = "|".join(f"{left}[^{right}\n{BAR}]*" for left, right in ('""', "''", "“”", "‘’"))
_ATTRIBUTES = f"(?:[^<>\"'“‘]|{_QUOTED})*"
_WHOLE = re.compile(f"<(?P<close>/?){_BARS}(?P<name>[A-Za-z_]+)(?P<attributes>(?:\\s{_ATTRIBUTES})?)(?P<self>/?)>")
_PART = re.compile(
    f"<(?:/?[｜{BAR}]*|/?{_BARS}(?P<name>[A-Za-z_]*)(?P<rest>(?:\\s{_ATTRIBUTES})?(?:{_QUOTE_OPEN})?/?))"
)
_ATTRIBUTE = re.compile(f"(\\w+)\\s*=\\s*({_QUOTED})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tag of `text[start:end]`. kind: `block` for what holds calls."""

    kind: Literal["block", "invoke", "parameter"]
    start: int
    end: int
    is_closer: bool
    closes_itself: bool
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """`text[start:]` may become a tag. has_bar: whether the special token is there, so that it is hardly text."""

    start: int
    has_bar: bool


def find_tag(text: str, start: int = 0) -> Tag | Beginning | None:
    """The first tag of a known name in `text`, or its beginning at the end of the text. Other tags are text."""
    place = text.find("<", start)
    while place >= 0:
        found = _tag_at(text, place)
        if found is not None:
            return found
        place = text.find("<", place + 1)
    return None


def spelt(text: str) -> str:
    """Text with special tokens as the strings they are written with."""
    for mark, string in SPELLINGS.items():
        text = text.replace(mark, string)
    return text


def _tag_at(text: str, start: int) -> Tag | Beginning | None:
    if found := _WHOLE.match(text, start):
        name = found["name"].lower()
        if name not in NAMES or found.end() - start > MAX_TAG:
            return None
        attributes = {key.lower(): value[1:-1] for key, value in _ATTRIBUTE.findall(found["attributes"])}
        return Tag(
            kind="block" if name in BLOCK_NAMES else "invoke" if name == "invoke" else "parameter",
            start=start,
            end=found.end(),
            is_closer=bool(found["close"]),
            closes_itself=bool(found["self"]) or found["attributes"].rstrip().endswith("/"),
            attributes=attributes,
        )
    found = _PART.fullmatch(text, start)
    if found is None or len(text) - start > MAX_TAG:
        return None
    name = (found["name"] or "").lower()
    fits = name in NAMES if found["rest"] else any(known.startswith(name) for known in NAMES)
    return Beginning(start=start, has_bar=BAR in found.group()) if fits else None
