"""Grammars that the library would not survive: regular expressions that must all match the same text.

The library builds their intersection step by step, and every step may double its size: 18 patterns that are searched
for take half a gigabyte, 30 more than there is, before any limit of its own acts. So they are counted beforehand.
Invariant: what is counted is never less than what the library joins. Called by `text.grammar`.
"""

import json
from typing import Any
from urllib.parse import unquote

from deepspan.errors import InputError

MAX_JOINED = 8  # a few milliseconds; published schemas join one or two
MAX_PATTERN_PROPERTIES = 32  # they are compared with each other
MAX_LARK_AND = 16
MAX_REFERENCES = 200  # one behind the other
_INNER = ("additionalProperties", "items", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "contains")


def check_schema_limits(schema: dict[str, Any]) -> None:
    """Raises InputError for a schema that would join too many patterns."""
    joined = _Joined(schema).count(schema, 0)
    if joined > MAX_JOINED:
        raise InputError(f"{joined} patterns and formats may meet in one string, {MAX_JOINED} are allowed")


def check_lark_limits(source: str) -> None:
    """The same for a Lark grammar, with the schemas that it holds."""
    if source.count("&") > MAX_LARK_AND:
        raise InputError(f"a Lark grammar may have {MAX_LARK_AND} `&`")
    decoder, place = json.JSONDecoder(), source.find("%json")
    while place >= 0:
        rest = source[place + len("%json") :].lstrip()
        try:
            schema, _ = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            schema = None  # the library cannot read it either
        if isinstance(schema, dict):
            check_schema_limits(schema)
        place = source.find("%json", place + 1)


def resolve(reference: Any, root: Any) -> Any:
    """What a JSON pointer like `#/$defs/name` leads to. Raises InputError for another form, and if it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        raise InputError(f"$ref {reference!r} must lead to a place in the schema, like '#/$defs/name'")
    found = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise InputError(f"$ref {reference!r} leads nowhere")
    return found


class _Joined:
    """Counts patterns and formats that may be joined for one string below a place in a schema.

    Schemas that apply to the same value add up, whichever of their parts the patterns are in; alternatives, and parts
    of one schema, do not.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def count(self, schema: Any, depth: int) -> int:
        if not isinstance(schema, dict):
            return 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        if depth > MAX_REFERENCES:
            raise InputError(f"references may lead through {MAX_REFERENCES} schemas")
        self._known[id(schema)] = 0  # what leads back here adds nothing new
        below = depth + 1
        own = ("pattern" in schema) + ("format" in schema)
        total = max(own, self._inside(schema, below)) + sum(self.count(one, below) for one in _list(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            total += max((self.count(one, below) for one in _list(schema, key)), default=0)
        if "$ref" in schema:
            total += self._behind(schema["$ref"], below)
        self._known[id(schema)] = total
        return total

    def _inside(self, schema: dict[str, Any], depth: int) -> int:
        """Of the parts of an object or array."""
        parts = [schema[key] for key in _INNER if key in schema]
        parts += [one for part in parts if isinstance(part, list) for one in part] + _list(schema, "prefixItems")
        parts += _dict(schema, "properties").values()
        patterned = _dict(schema, "patternProperties")
        if len(patterned) > MAX_PATTERN_PROPERTIES:
            raise InputError(f"an object may have {MAX_PATTERN_PROPERTIES} patternProperties, found {len(patterned)}")
        largest = max((self.count(part, depth) for part in parts), default=0)
        return largest + sum(self.count(part, depth) for part in patterned.values())

    def _behind(self, reference: Any, depth: int) -> int:
        try:
            target = self._root if reference == "#" else resolve(reference, self._root)
        except InputError:
            # The library may know the place by another name. It can hold no more than everything there is.
            return json.dumps(self._root).count('"pattern"') + json.dumps(self._root).count('"format"')
        return self.count(target, depth)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []


def _dict(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return schema[key] if isinstance(schema.get(key), dict) else {}
