"""The schema of a call's parameter in two: its strings, which are written raw, and everything else, which is JSON.

Invariants: the two parts together allow what the schema allows and nothing more; what cannot be told apart so is an
error, never dropped. `format` of a string is taken as the annotation that JSON schema says it is.
Called by `text.call_grammar`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from llguidance import regex_to_lark

from deepspan.errors import InputError
from deepspan.text.grammar_limits import resolve

# Keywords that constrain a value; all others are annotations or unknown, and JSON schema lets those pass.
CONSTRAINTS = frozenset(
    """
    type enum const $ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else pattern minLength maxLength
    multipleOf minimum maximum exclusiveMinimum exclusiveMaximum
    items prefixItems additionalItems unevaluatedItems contains minContains maxContains minItems maxItems uniqueItems
    properties patternProperties additionalProperties unevaluatedProperties propertyNames required
    minProperties maxProperties dependencies dependentRequired dependentSchemas
    """.split()
)
Check = Callable[[dict[str, Any]], None]

_NOT_STRING = ["null", "boolean", "number", "array", "object"]
_STRING_KEYS = {"pattern", "minLength", "maxLength", "format"}
_MAX_REFERENCES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """Some of the strings that a schema allows: `texts`, or all that `regex` matches and that are as long as asked."""

    texts: tuple[str, ...] | None = None
    regex: str | None = None
    least: int = 0
    most: int | None = None

    @property
    def is_any(self) -> bool:
        return self == Strings()

    def terminal(self) -> str:
        """Body of a terminal of a Lark grammar."""
        if self.texts is not None:
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in self.texts)
        parts = [] if self.regex is None else [f"/{self.regex}/"]
        if self.least or self.most is not None:
            parts.append(f"/(?s:.{{{self.least},{'' if self.most is None else self.most}}})/")
        return " & ".join(parts) or "/(?s:.*)/"

    def may_overlap(self, other: "Strings") -> bool:
        """Whether a text may be among both; only lists are known to be apart."""
        return self.texts is None or other.texts is None or not set(self.texts).isdisjoint(other.texts)


@dataclass(slots=True)
class Split:
    """A schema in two. rest: None if it allows strings only."""

    strings: list[Strings] = field(default_factory=list)
    rest: dict[str, Any] | None = None


def split_schema(schema: Any, root: dict[str, Any], check: Check, depth: int = 0) -> Split:
    """Strings and the rest of a schema. root: where its references lead.

    check: raises InputError for a schema that the library cannot keep.
    Raises InputError for a schema that cannot be told apart.
    """
    if schema is False:
        return Split()
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InputError(f"a schema must be an object or a boolean, found {schema!r}")
    if depth > _MAX_REFERENCES:
        raise InputError("$ref leads around in a circle")
    types = schema.get("type")
    listed = [types] if isinstance(types, str) else types
    if not isinstance(listed, list | None):
        raise InputError(f"type must be a name or a list of names, found {types!r}")
    if listed is not None and "string" not in listed:
        return Split(rest=schema)
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        if key in schema:
            return _split_branches(key, schema, root, check, depth)
    if "const" in schema or "enum" in schema:
        return _split_values(schema, listed, check)
    rest = None
    if listed != ["string"]:
        others = _NOT_STRING if listed is None else [name for name in listed if name != "string"]
        rest = {key: value for key, value in schema.items() if key not in _STRING_KEYS} | {"type": others}
    return Split(strings=[_patterned(schema, check)], rest=rest)


def _split_branches(key: str, schema: dict[str, Any], root: dict[str, Any], check: Check, depth: int) -> Split:
    if beside := CONSTRAINTS.intersection(schema) - {key}:
        raise InputError(f"{key} beside {min(beside)} cannot be kept in a call")
    branches = [resolve(schema[key], root)] if key == "$ref" else schema[key]
    if not isinstance(branches, list) or not branches:
        raise InputError(f"{key} must be a list of schemas")
    if key == "allOf" and len(branches) > 1:
        raise InputError("allOf of several schemas cannot be kept in a call")
    splits = [split_schema(branch, root, check, depth + 1) for branch in branches]
    if len(splits) == 1:
        return splits[0]
    strings = [one for split in splits for one in split.strings]
    if key == "oneOf" and any(one.may_overlap(other) for one, other in combinations(strings, 2)):
        raise InputError("oneOf of strings that may be the same cannot be kept in a call")
    rests = [split.rest for split in splits if split.rest is not None]
    return Split(strings=strings, rest={key: rests} if rests else None)


def _split_values(schema: dict[str, Any], listed: list[Any] | None, check: Check) -> Split:
    """Of a schema with a list of values."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise InputError(f"enum must be a list, found {values!r}")
    if "const" in schema:
        values = [value for value in values if json.dumps(value) == json.dumps(schema["const"])]
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    if texts and _STRING_KEYS & set(schema) - {"format"}:
        raise InputError("enum and const beside pattern, minLength or maxLength cannot be kept in a call")
    if texts:
        check({key: value for key, value in schema.items() if key not in _STRING_KEYS} | {"type": "string"})
    others = [value for value in values if not isinstance(value, str)]
    rest = None
    if others and listed != ["string"]:
        rest = {key: value for key, value in schema.items() if key not in {*_STRING_KEYS, "const"}} | {"enum": others}
        if listed is not None:
            rest["type"] = [name for name in listed if name != "string"]
    return Split(strings=[Strings(texts=texts)] if texts else [], rest=rest)


def _patterned(schema: dict[str, Any], check: Check) -> Strings:
    check({key: value for key, value in schema.items() if key != "format"} | {"type": "string"})
    pattern = schema.get("pattern")
    return Strings(
        regex=None if pattern is None else _whole_regex(pattern),
        least=int(schema.get("minLength", 0)),
        most=int(schema["maxLength"]) if "maxLength" in schema else None,
    )


def _whole_regex(pattern: str) -> str:
    """A regex that matches whole strings, from a pattern of JSON schema, which is searched for inside them."""
    anchors, bars, depth, in_class, index = [], False, 0, False, 0
    while index < len(pattern):
        letter = pattern[index]
        if letter == "\\":
            if pattern[index + 1 : index + 2] in ("A", "z", "Z", "b", "B", "") and not in_class:
                raise InputError(f"pattern {pattern!r} cannot be kept in a call")
            index += 1
        elif in_class:
            in_class = letter != "]"
        elif letter in "^$":
            anchors.append((index, letter))
        in_class |= letter == "["
        depth += {"(": 1, ")": -1}.get(letter, 0) if not in_class else 0
        bars |= letter == "|" and depth == 0 and not in_class
        index += 1
    head, tail = (0, "^") in anchors, (len(pattern) - 1, "$") in anchors
    if len(anchors) > head + tail or (anchors and bars):
        raise InputError(f"pattern {pattern!r} cannot be kept in a call: anchors must be first and last")
    inner = regex_to_lark(pattern[head : len(pattern) - tail], "dw")
    return f"{'' if head else '(?s:.*)'}(?:{inner}){'' if tail else '(?s:.*)'}"
