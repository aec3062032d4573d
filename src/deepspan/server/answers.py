"""Parts of answers that the forms of the OpenAI API share: usage, log-probabilities, calls, reasons.

Called by `server.chat`, `server.completions`, `server.responses` and `server.messages`.
"""

import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from deepspan.core.calls import CallDelta, ToolCall
from deepspan.core.output import RequestOutput, TokenLogprobs
from deepspan.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not


def usage(outputs: Sequence[RequestOutput], num_choices: int) -> dict[str, Any]:
    """Token counts of a job. outputs: of all choices, `num_choices` for each prompt; a prompt counts once."""
    prompts = outputs[::num_choices]
    prompt = sum(output.num_prompt_tokens for output in prompts)
    cached = sum(min(output.num_cached_tokens, output.num_prompt_tokens - 1) for output in prompts)
    generated = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "image_tokens": sum(output.num_image_tokens for output in prompts),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(output.num_reasoning_tokens for output in outputs)},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


class CallIds:
    """Ids of calls, made when a call is first seen."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], str] = {}

    def of(self, choice: int, call: int) -> str:
        return self._ids.setdefault((choice, call), f"call_{uuid4().hex[:24]}")


def call_object(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A whole call, as chat answers have it."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_delta(delta: CallDelta, call_id: str) -> dict[str, Any]:
    """A piece of a call, as chunks have it: id, type and name come with the first."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    function = {"name": delta.name, **function}
    return {"index": delta.index, "id": call_id, "type": "function", "function": function}


def token_logprobs(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, Any]:
    """One entry of a chat answer's log-probabilities. Text of a broken character is U+FFFD, its bytes are true."""
    return {
        **_token(tokenizer, found.token_id, found.logprob),
        "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in found.top],
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def finish_reason(output: RequestOutput, *, is_named: bool) -> str:
    """As the chat API says it. is_named: the one tool to be called was named, which counts as an ordinary stop."""
    if output.finish_reason == "stop" and any(call.is_complete for call in output.calls) and not is_named:
        return "tool_calls"
    return output.finish_reason


def prompt_logprobs(tokenizer: Tokenizer, output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Of each prompt token by id, null for the first, which nothing precedes."""
    if output.prompt_logprobs is None:
        return None
    return [None, *(_by_id(tokenizer, found) for found in output.prompt_logprobs)]


def _by_id(tokenizer: Tokenizer, found: TokenLogprobs) -> dict[str, Any]:
    known = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(found.top, start=1)}
    known.setdefault(found.token_id, (found.logprob, found.rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(tokenizer, token_id)}
        for token_id, (logprob, rank) in known.items()
    }


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token, special ones as their strings."""
    return tokenizer.decode([token_id], keep_special=True) if tokenizer.has_id(token_id) else ""


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.bytes_of(token_id) if tokenizer.has_id(token_id) else b""
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
