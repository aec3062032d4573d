"""Requests: validated when built, never changed afterwards.

A request is complete: ids and kinds of the expanded prompt, spans, prepared images. Progress lives elsewhere.
Made by `engine.inputs`, read by everything after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepspan.core.grammar import CompiledGrammar
from deepspan.core.media import ImageSpan, PreparedImage, TokenKind
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How the output is read. is_chat: reasoning, answer and calls are told apart; otherwise all of it is text.

    tools: JSON schema of parameters by name of tool; None if markup of calls is text like any other.
    """

    is_chat: bool
    tools: Mapping[str, Mapping[str, Any]] | None = None


RAW = OutputForm(is_chat=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, expanded, with its images.

    token_ids: int64 [T]; image tokens carry sentinel ids. kinds: int8 [T]. spans and images: one each per image, in
    order. cache_salt: requests with different salts never share cached prefixes. choice: number among the choices of a
    prompt, which draw from streams of their own. form: how the output is read. grammar: that of the
    parameters, compiled; the choices share it.
    Raises InputError if spans, kinds and images do not describe the same prompt.
    """

    token_ids: np.ndarray
    kinds: np.ndarray
    spans: tuple[ImageSpan, ...]
    images: tuple[PreparedImage, ...]
    params: SamplingParams
    form: OutputForm = RAW
    cache_salt: bytes = b""
    choice: int = 0
    grammar: CompiledGrammar | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise InputError("the prompt is empty")
        if len(self.token_ids) != len(self.kinds):
            raise InputError(f"{len(self.token_ids)} token ids and {len(self.kinds)} kinds")
        if (self.params.grammar is None) != (self.grammar is None):
            raise InputError("a request brings the grammar of its parameters compiled, and no other")
        check_spans(self.spans, self.kinds)
        if len(self.spans) != len(self.images):
            raise InputError(f"the prompt has {len(self.spans)} image placeholders and {len(self.images)} images")
        num_slots = int(np.count_nonzero(self.kinds == TokenKind.IMAGE))
        num_rows = sum(len(image.block.encoder_rows) for image in self.images)
        if num_slots != num_rows:
            raise InputError(f"the prompt has {num_slots} image tokens, its images have {num_rows} encoder rows")


def check_spans(spans: tuple[ImageSpan, ...], kinds: np.ndarray) -> None:
    """Spans must be ascending, disjoint, inside the prompt, START to END, and cover every sentinel.

    Raises InputError naming the span: a wrong span makes the model answer fluently about a shuffled picture.
    """
    covered = np.zeros(len(kinds), dtype=bool)
    end = 0
    for span in spans:
        where = f"image span [{span.first}, {span.last}] at {span.offset}"
        if not end <= span.offset <= span.first <= span.last:
            raise InputError(f"{where} overlaps the previous one or runs backwards")
        if span.last >= len(kinds):
            raise InputError(f"{where} ends after the prompt of {len(kinds)} tokens")
        if kinds[span.first] != TokenKind.START or kinds[span.last] != TokenKind.END:
            raise InputError(f"{where} does not run from START to END")
        if np.any(kinds[span.offset : span.first] != TokenKind.PAD):
            raise InputError(f"{where}: only lead pads may stand before START")
        inner = kinds[span.first + 1 : span.last]
        if np.isin(inner, (TokenKind.TEXT, TokenKind.START, TokenKind.END)).any():
            raise InputError(f"{where} holds text or another image's START or END")
        covered[span.offset : span.last + 1] = True
        end = span.last + 1
    stray = np.flatnonzero((kinds != TokenKind.TEXT) & ~covered)
    if len(stray):
        raise InputError(f"token {stray[0]} is an image token outside every image span")
