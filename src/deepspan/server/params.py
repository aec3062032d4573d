"""From fields of a request to `SamplingParams`.

Owns defaults: the request's field, else the checkpoint's `generation_config.json`, else that of the API.
Called by `server.jobs`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspan.core.grammar import Grammar
from deepspan.core.sampling import SamplingParams
from deepspan.errors import ConfigError
from deepspan.server.errors import ApiError
from deepspan.server.fields import ChatFields, CompletionFields, SamplingFields
from deepspan.text.segments import Text
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer

MAX_BIAS = 100.0
COMPLETION_TOKENS = 16  # of `/v1/completions`, where nothing else is said
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What is taken where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "SamplingDefaults":
        """As `generation_config.json` has them. Raises ConfigError if that file cannot be used."""
        file = folder / "generation_config.json"
        if not file.is_file():
            return cls()
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            known = {name: raw[name] for name in cls.__slots__ if raw.get(name) is not None}
            defaults = cls(**known)
            SamplingParams(**known)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: {error}") from error
        return defaults


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """max_tokens: of the request, or what the context may hold. Raises InputError or ApiError naming the field."""
    prompt_logprobs = fields.prompt_logprobs
    logprobs = None
    if isinstance(fields, ChatFields):
        if fields.top_logprobs is not None and not fields.logprobs:
            raise ApiError(status=400, message="top_logprobs needs logprobs true", param="top_logprobs")
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    elif isinstance(fields, CompletionFields):
        logprobs = fields.logprobs
        if fields.echo and logprobs is not None:
            prompt_logprobs = max(prompt_logprobs or 0, logprobs)
    if prompt_logprobs is not None and fields.prompt_logprobs is not None and fields.stream:
        raise ApiError(status=400, message="prompt_logprobs cannot be streamed", param="prompt_logprobs")
    seed = fields.seed
    return SamplingParams(
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=max(0, _or(fields.top_k, defaults.top_k)),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, tokenizer),
        bad_words=_bad_words(fields.bad_words or (), tokenizer),
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop=_stops(fields.stop),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        skip_special_tokens=_or(fields.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=fields.n or 1,
        seed=None if seed is None else seed % 2**64,
        ignore_eos=bool(fields.ignore_eos),
        grammar=grammar,
    )


def grammar_of(fields: SamplingFields, options: ChatOptions | None, *, single: bool = False) -> Grammar | None:
    """What the answer must look like: a forced call of a tool, `structured_outputs`, or `response_format`.

    single: one call and no more. Raises ApiError if two of them are asked for at once.
    """
    asked = [name for name in ("structured_outputs", "response_format") if _asks(getattr(fields, name))]
    if len(asked) == 2:
        raise ApiError(status=400, message="structured_outputs and response_format exclude each other", param=asked[0])
    if options is not None and options.tool_choice.mode == "required":
        if asked:
            raise ApiError(
                status=400, message=f"{asked[0]} and a required tool call exclude each other", param=asked[0]
            )
        return _calls(options, single=single)
    if not asked:
        return None
    of_format = asked[0] == "response_format"
    grammar = _of_format(fields.response_format or {}) if of_format else _of_structure(fields.structured_outputs or {})
    if options is None or not options.offered_tools:
        return grammar
    if grammar.kind not in ("json_schema", "json_object"):
        raise ApiError(status=400, message=f"{asked[0]} beside tools must be JSON", param=asked[0])
    return _calls(options, single=single, answer=json.loads(grammar.source or '{"type": "object"}'))


def _asks(value: Mapping[str, Any] | None) -> bool:
    return value is not None and value.get("type") != "text"


def _calls(options: ChatOptions, *, single: bool, answer: Mapping[str, Any] | None = None) -> Grammar:
    choice = options.tool_choice
    tools = [
        {"name": tool.name, "parameters": dict(tool.parameters)}
        for tool in options.offered_tools
        if choice.name in (None, tool.name)
    ]
    # A call that is required is opened by the prompt itself, unless reasoning comes before it.
    is_open = choice.mode == "required" and options.effort == "none"
    return Grammar.for_calls(tools, is_open=is_open, single=single or choice.name is not None, answer=answer)


def _of_format(value: Mapping[str, Any]) -> Grammar:
    match value.get("type"):
        case "json_object":
            return Grammar(kind="json_object", source="")
        case "json_schema":
            outer = value.get("json_schema")
            schema = outer.get("schema") if isinstance(outer, Mapping) else None
            if not isinstance(schema, Mapping):
                raise ApiError(status=400, message="json_schema.schema must be an object", param="response_format")
            return Grammar.for_schema(schema)
        case "regex" if isinstance(value.get("pattern"), str):
            return Grammar(kind="regex", source=value["pattern"])
    raise ApiError(
        status=400,
        message="response_format.type must be text, json_object, json_schema or regex (with a pattern)",
        param="response_format",
    )


def _of_structure(value: Mapping[str, Any]) -> Grammar:
    asked = [name for name in value if value[name] is not None and value[name] is not False]
    if len(asked) != 1 or asked[0] not in _STRUCTURES:
        raise ApiError(
            status=400,
            message=f"structured_outputs must hold exactly one of {', '.join(_STRUCTURES)}",
            param="structured_outputs",
        )
    name, given = asked[0], value[asked[0]]
    if name == "json_object":
        return Grammar(kind="json_object", source="")
    if name == "json":
        return Grammar("json_schema", given) if isinstance(given, str) else Grammar.for_schema(given)
    if name == "choice":
        return Grammar.for_choices(given)
    if not isinstance(given, str):
        raise ApiError(status=400, message=f"structured_outputs.{name} must be a string", param="structured_outputs")
    return Grammar(kind="regex" if name == "regex" else "lark", source=given)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stops(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value == "":
        raise ApiError(status=400, message="stop must not be empty", param="stop")
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _logit_bias(given: Mapping[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or not tokenizer.has_id(int(key)):
            raise ApiError(status=400, message=f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
        token_id = int(key)
        if token_id == tokenizer.special.image or tokenizer.special.is_sentinel(token_id):
            raise ApiError(status=400, message=f"logit_bias: token {key} stands for an image", param="logit_bias")
        biases[token_id] = min(MAX_BIAS, max(-MAX_BIAS, bias))
    return biases


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and inside it."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            found[tuple(tokenizer.encode([Text(text=text)]))] = None
    return tuple(found)
