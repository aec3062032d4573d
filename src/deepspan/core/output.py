"""What comes back: token events while a request runs, one record when it has ended.

Invariant: the deltas of a request's events joined are the texts of its output, and exactly one event is terminal.
Made by `engine.outputs`, read by `llm` and the command line.
"""

from dataclasses import dataclass, field
from typing import Literal

from deepspan.core.calls import CallDelta, ToolCall

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities. rank: of the token, from 1. top: (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of prompt tokens one after the other. first: position of the first of them."""

    first: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One new token of one request. text, reasoning, calls: what is new; finish_reason: on the terminal event only.

    token_id: None where a request ends without a new token (aborted or failed). is_reasoning: whether the token belongs
    to the reasoning. error: what failed.
    """

    request: int
    token_id: int | None
    text: str
    reasoning: str
    finish_reason: FinishReason | None
    calls: tuple[CallDelta, ...] = ()
    logprobs: TokenLogprobs | None = None
    is_reasoning: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    text: the answer. reasoning: what came before the closing think tag, empty in chat mode. calls: of tools; one that
    is not complete is there only if a limit cut it off. token_ids: all generated ids, the end-of-sentence token
    included; num_reasoning_tokens: how many of them were reasoning. num_image_tokens: prompt tokens that belong to
    images, pads included.
    num_cached_tokens: prompt tokens that were taken from the prefix cache; answers are equal whatever it is.
    stop: the string or token id that ended it.
    logprobs: of each new token; prompt_logprobs: of each prompt token after the first; None unless asked for.
    error: why it failed, with finish_reason "error".
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int = field(default=0, compare=False)
    num_reasoning_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
