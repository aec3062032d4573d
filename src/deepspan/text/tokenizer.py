"""Tokenizer of the model: segments or raw text -> ids, ids -> text.

Owns the vocabulary. Invariants: truncation, padding and automatic special tokens are off and never touched; text of a
client never yields a control token, because it is encoded by a second backend that does not know them; each thread
uses its own copy of a backend (a copy of the released tokenizer takes a second or two and some memory, so threads that
encode should be few and live long); encoding releases the interpreter lock.

Decoding joins bytes of tokens and needs no backend. Called by the server, the Python API and `text.detokenize`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from deepspan.errors import ConfigError, InputError
from deepspan.text.byte_level import token_bytes
from deepspan.text.segments import ImageSlot, Segment, Special, Text, check_encodable
from deepspan.text.special import SpecialIds
from deepspan.text.thread_copies import ThreadCopies


class Tokenizer:
    """Tokenizer read from `path`, a folder with `tokenizer.json` or that file itself.

    vision: whether the image tokens are required. special: ids of the special tokens. vocab_size: highest id plus one.
    control_ids: every token that text cannot spell, the special ones among them.

    Raises ConfigError if the file cannot be read, is not a byte-level BPE, or lacks a special token.
    """

    def __init__(self, path: Path | str, *, vision: bool) -> None:
        raw = _read_json(Path(path))
        full = _backend(raw)
        vocab = full.get_vocab(with_added_tokens=True)
        self.special = SpecialIds.resolve(vocab, vision=vision)
        self.vocab_size = max(vocab.values()) + 1
        self.control_ids = frozenset(entry["id"] for entry in raw["added_tokens"])
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        for token, token_id in vocab.items():
            self._bytes[token_id] = token_bytes(token)
        for entry in raw["added_tokens"]:
            self._bytes[entry["id"]] = entry["content"].encode("utf-8")
        self._full = ThreadCopies(full)
        self._plain = ThreadCopies(_backend(raw | {"added_tokens": []}))

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(len(token) for token in self._bytes if token is not None)

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a prompt. An image slot is one image id, in the order of the slots; expansion comes later.

        Neighbouring texts are encoded as one run: a token may reach over the border between template and client text.
        Raises InputError for text that is not Unicode, and for an image if the model has no vision.
        """
        pieces: list[int | str] = []
        run: list[str] = []
        for segment in segments:
            if isinstance(segment, Text):
                run.append(segment.text)
                continue
            pieces += ["".join(run), self._control_id(segment)]
            run = []
        pieces.append("".join(run))
        runs = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self._encode_plain(runs))
        ids: list[int] = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else next(encoded)
        return ids

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a raw completion prompt: special strings in `text` are special tokens, nothing is added.

        Raises InputError for text that is not Unicode, and for image tokens: their rows would be routed as image rows
        without an image behind them.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt must be a string, found {type(text).__name__}")
        check_encodable(text, "prompt")
        ids = self._full.get().encode_batch_fast([text], add_special_tokens=False)[0].ids
        for token_id in ids:
            if token_id == self.special.image or self.special.is_sentinel(token_id):
                raise InputError(f"prompt: the image token {self._token(token_id)} cannot be written as text")
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of `ids`, broken UTF-8 as U+FFFD.

        Without `keep_special` the ids of `SpecialIds.hidden` leave no trace, as in generated text.
        Raises InputError for an id outside the vocabulary.
        """
        hidden = frozenset() if keep_special else self.special.hidden
        return b"".join(self.bytes_of(token_id) for token_id in ids if token_id not in hidden).decode(
            "utf-8", "replace"
        )

    def has_id(self, token_id: int) -> bool:
        """Whether `token_id` is a token; vocabularies have gaps, and models have rows beyond them."""
        return 0 <= token_id < self.vocab_size and self._bytes[token_id] is not None

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token; a token may hold part of a character. Raises InputError if there is no such id."""
        found = self._bytes[token_id] if 0 <= token_id < self.vocab_size else None
        if found is None:
            raise InputError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return found

    def _control_id(self, segment: Special | ImageSlot) -> int:
        if isinstance(segment, Special):
            return self.special.grammar[segment.token]
        if self.special.image is None:
            raise InputError(f"{segment.where}: this model has no vision, images cannot be given to it")
        return self.special.image

    def _encode_plain(self, runs: list[str]) -> list[list[int]]:
        for run in runs:
            check_encodable(run, "text")
        encoded = [encoding.ids for encoding in self._plain.get().encode_batch_fast(runs, add_special_tokens=False)]
        # BOS and its like are entries of the model vocabulary too, so that merges could in principle spell them.
        if not all(self.control_ids.isdisjoint(ids) for ids in encoded):
            raise InputError("text spells a control token of the vocabulary")
        return encoded

    def _token(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", "replace")


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict) or (raw.get("model") or {}).get("type") != "BPE":
        raise ConfigError(f"{file}: model.type must be BPE")
    if (raw.get("decoder") or {}).get("type") != "ByteLevel":
        raise ConfigError(f"{file}: decoder.type must be ByteLevel")
    return raw | {"truncation": None, "padding": None, "added_tokens": raw.get("added_tokens") or []}


def _backend(raw: dict[str, Any]) -> Backend:
    try:
        return Backend.from_str(json.dumps(raw, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception for a file it cannot build
        raise ConfigError(f"tokenizer.json cannot be used: {error}") from error
