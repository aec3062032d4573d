"""Arguments of one generated call, from parameters in markup to the text of a JSON object.

Owns typing: what the markup says (`string="true"`), what the tool's schema allows, and what the text is. Invariant: the
pieces of a call joined are valid JSON once the call is closed, and the same however the value arrived.
Called by `text.parser`.
"""

import json
from collections.abc import Mapping
from typing import Any

from deepspan.text.markup import spelt
from deepspan.text.tools import strict_json

WRAPPERS = ("arguments", "input")  # a lone parameter of this name holds all arguments as one object
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class Arguments:
    """Writes the arguments of one call. parameters: schema of the tool; empty if it is unknown."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        properties = parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._count = 0
        self._value = ""
        self._name = ""
        self._string: bool | None = None
        self._streams = False
        self._wrapped: str | None = None  # text of an object that may be all arguments

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has come yet."""
        return self._count == 0 and self._wrapped is None

    def begin(self, name: str, string: str | None) -> str:
        """A parameter begins. string: its attribute, "true" or "false". Returns new text of the object."""
        out = self._unwrap_as_parameter()
        self._name, self._value = spelt(name), ""
        self._string = {"true": True, "false": False}.get((string or "").strip().lower())
        types = self._types()
        is_text = types == {"string"} or (self._string is True and (not types or "string" in types))
        self._streams = is_text and not self._may_be_wrapper()
        if self._streams:
            out += self._key() + '"'
        return out

    def add(self, text: str) -> str:
        """More of the value."""
        text = spelt(text)
        if self._streams:
            return _inner(text)
        self._value += text
        return ""

    def end(self) -> str:
        """The parameter is closed."""
        if self._streams:
            return '"'
        if self._may_be_wrapper() and self._string is not True and isinstance(_parsed(self._value), dict):
            self._wrapped = self._value.strip()
            return ""
        return self._key() + self._typed()

    def close(self, body: str) -> str:
        """The call is closed. body: text where parameters should be; a JSON object there is all arguments."""
        if self._wrapped is not None:
            return self._wrapped
        if self._count == 0:
            body = spelt(body).strip()
            return body if isinstance(_parsed(body), dict) else "{}"
        return "}"

    def _key(self) -> str:
        self._count += 1
        return f"{'{' if self._count == 1 else ', '}{json.dumps(self._name, ensure_ascii=False)}: "

    def _may_be_wrapper(self) -> bool:
        return self._count == 0 and self._name in WRAPPERS and self._name not in self._properties

    def _unwrap_as_parameter(self) -> str:
        """Another parameter follows, so the object is the value of its own name."""
        if self._wrapped is None:
            return ""
        value, self._wrapped = self._wrapped, None
        return self._key() + value

    def _types(self) -> set[str]:
        return _types_of(self._properties.get(self._name))

    def _typed(self) -> str:
        types, text = self._types(), self._value
        value = _parsed(text)
        is_json = value is not _NO_JSON
        if self._string is True:
            # Text, unless the schema has no place for text and it is a literal of what the schema has.
            keeps = not types or "string" in types or not (is_json and _fits(value, types))
        elif self._string is False:
            keeps = not is_json or types == {"string"}
        else:
            keeps = not is_json or types == {"string"} or isinstance(value, str)
        return json.dumps(text, ensure_ascii=False) if keeps else text.strip()


class _NoJson:
    pass


_NO_JSON = _NoJson()


def _parsed(text: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _inner(text: str) -> str:
    """Text as it stands inside the quotes of a JSON string; made character by character, so pieces join."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types_of(schema: Any) -> set[str]:
    """JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list | tuple):
        return {kind for kind in declared if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list | tuple):
        return {kind for value in values for kind in _JSON_TYPES if _fits(value, {kind})}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list | tuple):
            found = [_types_of(branch) for branch in branches]
            return set().union(*found) if all(found) else set()
    return set()


def _fits(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _JSON_TYPES.get(kind, ())) for kind in types)
