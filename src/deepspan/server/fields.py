"""Fields of requests: types, ranges, and what becomes of fields that are not served.

Invariants: a value out of range is refused by name, and so is a field that exists elsewhere and would change the
answer; a field that nobody knows is reported; null is absent. Called by the endpoints of `server`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from deepspan.core.sampling import MAX_CHOICES, MAX_LOGPROBS
from deepspan.server.errors import ApiError

MAX_STOPS = 16
MAX_BAD_WORDS = 64
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096

# Fields that clients send and that change nothing here.
IGNORED = frozenset(
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity "
    "spaces_between_special_tokens return_tokens_as_token_ids".split()
)
# Fields that would change the answer, with what to do instead. Their neutral values are let through.
REFUSED: Mapping[str, str] = {
    "audio": "this model has no audio",
    "modalities": "this model writes text",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no web search",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs or response_format",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "structural_tag": "use response_format",
    "best_of": "use n",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "logits_processors": "logits processors are not supported",
    "mm_processor_kwargs": "images are prepared in one way only",
    "media_io_kwargs": "images are prepared in one way only",
    "truncate_prompt_tokens": "prompts are not cut",
    "add_special_tokens": "this tokenizer adds none: write them into the prompt",
    "thinking_token_budget": "use reasoning_effort or max_completion_tokens",
    "chat_template": "the format of prompts is fixed",
    "documents": "put documents into messages",
    "kv_transfer_params": "caches are not transferred",
    "prompt_embeds": "prompts are text or token ids",
    "store": "answers are not stored",
    "background": "answers are not stored",
    "previous_response_id": "answers are not stored: send the conversation",
    "conversation": "answers are not stored: send the conversation",
    "container": "there are no containers",
    "mcp_servers": "there are no remote tools",
    "context_management": "send the conversation as it should be",
}
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, ["text"], 1, 1.0, "")

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2**26)]


class Fields(BaseModel):
    """What every request may have. Unknown fields are kept, to be judged by `unknown_fields`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Fields):
    """How tokens are chosen, with the defaults of the server where a field is absent."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=2**18)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=2**18)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class ChatFields(SamplingFields):
    """`/v1/chat/completions`. Messages are checked by the chat encoder, which names what is wrong in its own words."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    drop_thinking: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class CompletionFields(SamplingFields):
    """`/v1/completions`: a raw prompt, or several."""

    prompt: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    suffix: Text | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeFields(Fields):
    """`/tokenize`: a raw prompt, or all that a chat request has."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """`/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=2**22)]


def unknown_fields(fields: Fields, *, strict: bool) -> list[str]:
    """Names of fields that nobody knows. Raises ApiError for a refused one, and for unknown ones if `strict`."""
    unknown: list[str] = []
    for name, value in (fields.model_extra or {}).items():
        if name in IGNORED or value is None:
            continue
        if name in REFUSED:
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL):
                raise ApiError(status=400, message=f"{name} is not supported: {REFUSED[name]}", param=name)
            continue
        unknown.append(name[:64])
    if unknown and strict:
        raise ApiError(status=400, message=f"unknown fields: {', '.join(sorted(unknown)[:10])}", param=unknown[0])
    return sorted(unknown)
