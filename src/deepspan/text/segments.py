"""Pieces of an encoded prompt: client or template text, special tokens, image slots.

Owns the boundary that makes prompts injection-safe: only a `Special` may become a control token, whatever a `Text`
spells. Made by `text.chat`, turned into ids by `text.tokenizer`.
"""

from dataclasses import dataclass

from deepspan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Ordinary text; special strings inside it are characters and nothing more."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """One special token, by its string in `text.special`."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlot:
    """Where one image stands.

    source: a string is an address (data:, http:, ...), to be judged by the loader's rules and never opened as a path;
        anything else is an object given through the Python API.
    where: place in the request for messages, like `messages[2].content[0]`.
    """

    source: object
    where: str


Segment = Text | Special | ImageSlot


def check_encodable(text: str, where: str) -> str:
    """Return `text` if it is valid Unicode.

    Raises InputError for a lone surrogate: it is legal in JSON, has no UTF-8 form, and tokenizers answer it with a
    TypeError.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: lone surrogate U+{ord(text[error.start]):04X} is not text") from error
    return text
