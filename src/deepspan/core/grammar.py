"""Grammars that an answer must follow: validated when built, never changed afterwards.

Owns what a grammar is before anybody compiles it, and what the engine needs to know of a compiled one. Invariants: a
grammar is plain text, hashable, limited in size and depth; nothing here knows a vocabulary. Made by users and the
server as a part of `SamplingParams`; compiled by `text.grammar`, followed by `runtime.guidance`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from deepspan.errors import InputError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "calls"]

MAX_SOURCE_BYTES = 256 * 1024
MAX_DEPTH = 64
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer (after reasoning) must be.

    kind and source:
        json_object: any JSON object; the source is empty.
        json_schema: JSON that fits a schema, an object given as JSON text.
        regex: text that a pattern matches from end to end. Rust's syntax; \\d and \\w are ASCII.
        choice: one of several texts, given as a JSON list.
        lark: text of a Lark grammar, with what the llguidance library adds to that language.
        calls: one or several calls of tools in the model's own markup, given as the JSON text of
            `{"tools": [{"name": ..., "parameters": {...}}], "open": ..., "single": ...}`. open: whether the tag that
            opens the block stands in the prompt already. single: exactly one call. With a schema as `answer`, JSON that
            fits it may come instead of calls.
    Raises InputError naming what is wrong.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InputError(f"grammar: kind must be one of {', '.join(get_args(GrammarKind))}, found {self.kind!r}")
        if not isinstance(self.source, str):
            raise InputError(f"grammar: source must be text, found {type(self.source).__name__}")
        if (self.source == "") != (self.kind == "json_object"):
            raise InputError(f"grammar: source of kind {self.kind} must {'be' if self.source else 'not be'} empty")
        try:
            size = len(self.source.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InputError("grammar: source has a lone surrogate, which is not text") from error
        if size > MAX_SOURCE_BYTES:
            raise InputError(f"grammar: source may have {MAX_SOURCE_BYTES} bytes, found {size}")
        check = {"json_schema": _check_schema, "choice": _check_choices, "calls": _check_calls}.get(self.kind)
        if check is not None:
            check(parse_json(self.source, f"grammar: source of kind {self.kind}"))

    @classmethod
    def for_schema(cls, schema: Mapping[str, Any]) -> "Grammar":
        """JSON that fits `schema`."""
        return cls("json_schema", _dump(schema))

    @classmethod
    def for_choices(cls, choices: Sequence[str]) -> "Grammar":
        """One of `choices`."""
        return cls("choice", _dump(list(choices)))

    @classmethod
    def for_calls(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_open: bool,
        single: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> "Grammar":
        """Calls of `tools`, each with a `name` and perhaps `parameters`; other keys do not matter.

        answer: schema of JSON that may come instead.
        """
        known = [{key: tool[key] for key in ("name", "parameters") if key in tool} for tool in tools]
        other = {} if answer is None else {"answer": answer}
        return cls("calls", _dump({"tools": known, "open": is_open, "single": single, **other}))


class Matcher(Protocol):
    """Where one running request stands in its grammar."""

    def allowed(self) -> np.ndarray:
        """Tokens that may come next: bool [vocabulary of the tokenizer]. Raises InputError if there is none."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token. Raises InputError if the grammar does not allow it."""
        ...

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these could come next, one after the other. Nothing is taken."""
        ...


class CompiledGrammar(Protocol):
    """A grammar made ready for one vocabulary, where and when its request was built.

    It does not travel between processes: an executor in another one compiles `SamplingParams.grammar` itself.
    """

    @property
    def think_close(self) -> int:
        """Id of the token that ends reasoning."""
        ...

    def in_reasoning(self, prompt: Sequence[int] | np.ndarray) -> bool:
        """Whether what follows a prompt is reasoning, which no grammar constrains."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the grammar; it shares nothing with any other."""
        ...


def parse_json(text: str, what: str) -> Any:
    """Value of a JSON text. Raises InputError, beginning with `what`, if it is none, is nested too deep or not text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise InputError(f"{what}: JSON may be nested {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise InputError(f"{what}: not JSON: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _parts(outer)]
    if level:
        raise InputError(f"{what}: JSON may be nested {MAX_DEPTH} deep")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:  # a lone surrogate, or a number beyond all floats
        raise InputError(f"{what}: {error}") from error
    return value


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"grammar: {error}") from error


def _check_schema(value: Any) -> None:
    if not isinstance(value, dict):
        raise InputError(f"grammar: a schema must be an object, found {type(value).__name__}")


def _check_choices(value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InputError("grammar: choices must be a list of texts, at least one and none of them empty")


def _check_calls(value: Any) -> None:
    if not isinstance(value, dict) or set(value) - {"answer"} != {"tools", "open", "single"}:
        raise InputError("grammar: calls must be an object of `tools`, `open`, `single` and perhaps `answer`")
    if not isinstance(value.get("answer", {}), dict) or ("answer" in value and value["open"]):
        raise InputError("grammar: answer must be a schema, and there is none where calls are opened already")
    for name in ("open", "single"):
        if not isinstance(value[name], bool):
            raise InputError(f"grammar: {name} must be true or false, found {value[name]!r}")
    tools = value["tools"]
    if not isinstance(tools, list) or not tools:
        raise InputError("grammar: tools must be a list of at least one tool")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        where = f"grammar: tools[{number}]"
        if not isinstance(tool, dict) or "name" not in tool or not set(tool) <= {"name", "parameters"}:
            raise InputError(f"{where} must be an object of `name` and perhaps `parameters`")
        name = tool["name"]
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise InputError(f"{where}: name must be 1 to 64 letters, digits, _ or -, found {name!r}")
        if name in names:
            raise InputError(f"{where}: there are two tools named {name}")
        names.add(name)
        if not isinstance(tool.get("parameters"), dict | None):
            raise InputError(f"{where}: parameters must be an object, found {tool['parameters']!r}")
