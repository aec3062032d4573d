"""The model's markup for tool calls as a Lark grammar: declared tools, declared parameters, typed values.

Owns the canonical form of a block: a string is raw text, everything else is JSON, and a value that may be either says
by its `string` attribute which it is. Invariants: the marks of tags are the one control token, never text that looks
like it; parameters come in declared order, each at most once, required ones always; what the schema of a tool asks and
the markup cannot keep is an error. Called by `text.grammar`.
"""

import json
from collections.abc import Iterator
from typing import Any

from deepspan.errors import InputError
from deepspan.text.schema_split import CONSTRAINTS, Check, Strings, split_schema

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CHARS = 1024 * 1024  # definitions are written out for every parameter that refers to them
_DEFINITIONS = ("$defs", "definitions")
# Other properties than the declared ones are never sent, whatever the schema says of them.
_KEPT = {"type", "properties", "required", "additionalProperties", "unevaluatedProperties"}


def calls_lark(source: dict[str, Any], dsml: int, check: Check) -> str:
    """Rules of a block of calls, `start` among them, for a checked source of kind `calls`.

    dsml: id of the token that marks every tag. check: raises InputError for a schema that the library cannot keep.
    Raises InputError naming tool and parameter.
    """
    mark = f"<[{dsml}]>"
    size = 0
    calls = [f"call_{number}" for number in range(len(source["tools"]))]
    opening = "" if source["open"] else f'"\\n\\n"? "<" {mark} "tool_calls>\\n" '
    answer = source.get("answer")
    if answer is not None:
        check(answer)
    rules = [
        "start: block" if answer is None else f"start: block | answer\nanswer: %json {json_text(answer)}",
        f'block: {opening}call{"" if source["single"] else "+"} "</" {mark} "tool_calls>"',
        f"call: {' | '.join(calls)}",
        # The "</" that ends a text belongs to its terminal: a terminal takes all it can, so it must say where it ends.
        f'TEXT: {Strings().terminal()} "</"',
    ]
    for number, (tool, call) in enumerate(zip(source["tools"], calls, strict=True)):
        name = _literal(f'invoke name="{tool["name"]}">\n')
        rules.append(f'{call}: "<" {mark} {name} body_{number} "</" {mark} "invoke>\\n"')
        for rule in _tool_rules(number, tool, mark, check):
            rules.append(rule)
            size += len(rule)
            if size > MAX_CHARS:
                raise InputError(f"the tools, with all definitions, have more than {MAX_CHARS} characters")
    return "\n".join(rules) + "\n"


def json_text(schema: dict[str, Any]) -> str:
    """A schema with the library's option for spaces. Raises InputError if it brings options of its own."""
    if "x-guidance" in schema:
        raise InputError("x-guidance is no keyword of JSON schema")
    return json.dumps({"x-guidance": JSON_OPTIONS, **schema}, ensure_ascii=False)


def _tool_rules(number: int, tool: dict[str, Any], mark: str, check: Check) -> Iterator[str]:
    """Rules of one tool: `body_<number>` and what it needs."""
    root = tool.get("parameters") or {}
    where = f"tool {tool['name']}"
    declared, required = _declared(root, where)

    def checked(schema: dict[str, Any]) -> None:
        check(_with_definitions(schema, root))

    rules: dict[str, bool] = {}  # of parameters, and whether they must come
    for name, schema in declared.items():
        must = name in required
        if schema is False and not must:
            continue
        rule = f"p_{number}_{len(rules)}"
        rules[rule] = must
        try:
            yield from _parameter_rules(rule, name, schema, root, mark, checked)
        except InputError as error:
            raise InputError(f"{where}: parameter {name!r}: {error}") from error
    if any(rules.values()):
        yield f"body_{number}: {' '.join(rule if must else f'{rule}?' for rule, must in rules.items())}"
        return
    # A call without arguments has one blank line; otherwise at least one of the parameters comes.
    yield f'body_{number}: "\\n"' + (f" | some_{number}_0" if rules else "")
    for index, rule in enumerate(rules):
        later = f"some_{number}_{index + 1}"
        yield f"some_{number}_{index}: {rule}" + (f" {later}? | {later}" if index + 1 < len(rules) else "")


def _declared(root: dict[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """(schemas of parameters by name, names of the required ones)."""
    if lost := CONSTRAINTS.intersection(root) - _KEPT:
        raise InputError(f"{where}: parameters: {min(lost)} cannot be kept in a call")
    if root.get("type", "object") != "object":
        raise InputError(f"{where}: parameters: type must be object, found {root['type']!r}")
    required, properties = root.get("required") or [], root.get("properties") or {}
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InputError(f"{where}: parameters: required must be a list of names, found {required!r}")
    if not isinstance(properties, dict):
        raise InputError(f"{where}: parameters: properties must be an object, found {properties!r}")
    for name in (*properties, *required):
        if not name or '"' in name or not name.isprintable():
            raise InputError(f"{where}: a call cannot spell a parameter named {name!r}")
    return properties | {name: True for name in required if name not in properties}, set(required)


def _parameter_rules(rule: str, name: str, schema: Any, root: dict[str, Any], mark: str, check: Check) -> Iterator[str]:
    split = split_schema(schema, root, check)
    forms: list[str] = []
    if split.strings:
        terminal = "TEXT"
        if not any(strings.is_any for strings in split.strings):
            terminal = rule.upper()
            parts = [f"{terminal}_{index}" for index in range(len(split.strings))]
            for part, strings in zip(parts, split.strings, strict=True):
                yield f"{part}: {strings.terminal()}"
            yield f'{terminal}: ({" | ".join(parts)}) "</"'
        tag = _literal(f'parameter name="{name}" string="true">')
        forms.append(f"{tag} {terminal}")
    if split.rest is not None:
        whole = _with_definitions(split.rest, root)
        check(whole)
        yield f"{rule}_json: %json {json_text(whole)}"
        tag = _literal(f'parameter name="{name}" string="false">')
        forms.append(f'{tag} {rule}_json "</"')
    if not forms:
        raise InputError("no value fits the schema")
    yield f'{rule}: "<" {mark} ({" | ".join(forms)}) {mark} "parameter>\\n"'


def _with_definitions(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema that stands alone, with the definitions where its references look for them."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    shared = {key: {**schema.get(key, {}), **root[key]} for key in _DEFINITIONS if isinstance(root.get(key), dict)}
    return schema | shared


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
