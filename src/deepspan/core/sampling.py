"""How the tokens of a request are chosen: validated when built, never changed afterwards.

Made by users and the server, read by `runtime.sampler` and `engine.outputs`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspan.core.grammar import Grammar
from deepspan.errors import InputError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 64
_REALS = (  # name, smallest, largest
    ("temperature", 0.0, sys.float_info.max),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, sys.float_info.max),
)
_INTEGERS = (("top_k", 0, None), ("max_tokens", 1, None), ("min_tokens", 0, None), ("n", 1, MAX_CHOICES))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p, min_p: 1 and 0 keep all.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and per occurrence.
    logit_bias: by token id, added. bad_words: token sequences that are never completed.
    max_tokens: new tokens at most. min_tokens: before these, neither the end of sequence nor `stop_token_ids` come.
    stop: strings that end the text and do not appear in it, unless include_stop_str_in_output.
    stop_token_ids: tokens that end it like the end token. allowed_token_ids: nothing else is generated; empty for all.
    skip_special_tokens: special tokens leave no trace in raw text.
    logprobs: how many alternatives of each new token are reported, None for no log-probabilities at all;
    prompt_logprobs: the same for the prompt's tokens.
    n: independent choices. seed: of the request's own random stream; None draws one when the request is built.
    ignore_eos: go on after the end-of-sentence token (benchmarks).
    grammar: what the answer must be, from its first token after reasoning to its end.
    Raises InputError naming the parameter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in _REALS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(f"{name} must be a number from {low:g} to {high:g}, found {value!r}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InputError(f"{name} must be above 0")
        for name, least, most in _INTEGERS:
            _check_integer(name, getattr(self, name), least, most)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise InputError(f"seed must be an integer from 0 to 2^64 - 1, found {self.seed!r}")
        self._check_types()
        self._check_lists()

    def _check_types(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if not isinstance(self.grammar, Grammar | None):
            raise InputError(f"grammar must be a Grammar, found {type(self.grammar).__name__}")

    def _check_lists(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError(f"stop must be a list of texts, none of them empty, found {self.stop!r}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all(_is_token(token) for token in getattr(self, name)):
                raise InputError(f"{name} must be token ids, found {getattr(self, name)!r}")
        if not all(len(word) and all(_is_token(token) for token in word) for word in self.bad_words):
            raise InputError(f"bad_words must be lists of token ids, none of them empty, found {self.bad_words!r}")
        for token, bias in self.logit_bias.items():
            if not _is_token(token) or not _is_number(bias):
                raise InputError(f"logit_bias must map token ids to numbers, found {token!r}: {bias!r}")
        for name in ("stop", "stop_token_ids", "bad_words"):
            if len(getattr(self, name)) > MAX_STOPS:
                raise InputError(f"{name} may have {MAX_STOPS} elements, found {len(getattr(self, name))}")

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the largest logit and nothing else is asked."""
        restricted = self.bad_words or self.min_tokens or self.allowed_token_ids or self.grammar
        changed = self.logit_bias or restricted or self.logprobs is not None
        penalised = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return self.temperature == 0 and not changed and not penalised


def _check_integer(name: str, value: object, least: int, most: int | None) -> None:
    if not isinstance(value, int) or not _is_integer(value) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be an integer {limits}, found {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_token(value: object) -> bool:
    return _is_integer(value) and isinstance(value, int) and value >= 0
