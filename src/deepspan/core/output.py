"""What comes back: token events while a request runs, one record when it has ended.

Invariant: the deltas of a request's events joined are the texts of its output, and exactly one event is terminal.
Made by `engine.outputs`, read by `llm` and the command line.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One new token of one request. text and reasoning are deltas; finish_reason is set on the terminal event only."""

    request: int
    token_id: int
    text: str
    reasoning: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    text: the answer. reasoning: what came before the closing think tag, empty in chat mode. token_ids: all generated
    ids, the end-of-sentence token included. num_image_tokens: prompt tokens that belong to images, pads included.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_image_tokens: int
