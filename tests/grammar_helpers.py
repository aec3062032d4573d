"""What tests of grammars need: a small judge of JSON schema, and calls read back from markup."""

import json
import math
import re
from typing import Any

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def conforms(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a value fits a schema, as far as tests use the language."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(conforms(value, one, root) for one in schema["anyOf"])
    types = schema.get("type", list(_TYPES))
    kinds = [types] if isinstance(types, str) else types
    if not any(isinstance(value, _TYPES[k]) and (not isinstance(value, bool) or k == "boolean") for k in kinds):
        return False
    fits = value in schema.get("enum", [value]) and value == schema.get("const", value)
    if isinstance(value, str):
        fits &= schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        fits &= re.search(schema.get("pattern", ""), value) is not None
    elif isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        fits &= all(name in value for name in schema.get("required", []))
        fits &= all(conforms(inner, known.get(name, other), root) for name, inner in value.items())
    elif isinstance(value, list):
        fits &= schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
        fits &= all(conforms(inner, schema.get("items", True), root) for inner in value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        fits &= schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    return fits


_CALL = re.compile(r'<｜DSML｜invoke name="([^"]*)">\n(.*?)</｜DSML｜invoke>\n', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]*)" string="(true|false)">(.*?)</｜DSML｜parameter>\n', re.DOTALL
)


def read_calls(text: str, *, is_open: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every call of a canonical block; asserts that the block is one, to the last character."""
    opener, closer = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
    if not is_open:
        text = text.removeprefix("\n\n")
        assert text.startswith(opener), text
        text = text.removeprefix(opener)
    assert text.endswith(closer), text
    text, calls, place = text.removesuffix(closer), [], 0
    while place < len(text):
        found = _CALL.match(text, place)
        assert found is not None, text[place:]
        calls.append((found[1], _arguments(found[2])))
        place = found.end()
    assert calls
    return calls


def _arguments(body: str) -> dict[str, Any]:
    if body == "\n":
        return {}
    values: dict[str, Any] = {}
    place = 0
    while place < len(body):
        found = _PARAMETER.match(body, place)
        assert found is not None, body[place:]
        assert found[1] not in values
        values[found[1]] = found[3] if found[2] == "true" else json.loads(found[3])
        assert found[2] == "true" or not isinstance(values[found[1]], str), "strings are written raw"
        place = found.end()
    assert values
    return values
