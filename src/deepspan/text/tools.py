"""Tools in prompts: definitions, calls of earlier turns, and the markup of both.

Owns the reading of what clients send about tools, and DSML, the model's own markup for calls. Invariants: only the bars
that the template writes are special tokens, those inside names, schemas and values are text; what a client sent about
a call is kept whatever its form, so that the model never sees a history that did not happen.

Called by `text.switches` (definitions, choice) and `text.chat` (calls).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from deepspan.errors import InputError
from deepspan.text import special
from deepspan.text.segments import Segment, Special, Text, check_encodable

MAX_TOOLS = 256
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
DSML_BAR = Special(token=special.DSML)

# `|` stands for the special token; everything else is ordinary text.
_INTRODUCTION = """\n\n## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<|tool_calls>" block like the following:

<|tool_calls>
<|invoke name="$TOOL_NAME">
<|parameter name="$PARAMETER_NAME" string="true¦false">$PARAMETER_VALUE</|parameter>
...
</|invoke>
<|invoke name="$TOOL_NAME2">
...
</|invoke>
</|tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
_CONCLUSION = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
CALLS_OPENER = "\n\n<|tool_calls>\n"  # also what opens a forced call


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. parameters: JSON schema of an object, as sent."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """mode: whether the answer may or must be calls. name: the one tool that must be called."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an earlier turn. arguments: by parameter name, in the order sent."""

    id: str | None
    name: str
    arguments: Mapping[str, Any]


def markup(template: str) -> list[Segment]:
    """Segments of DSML written with `|` for the special token."""
    segments: list[Segment] = []
    for index, piece in enumerate(template.split("|")):
        if index:
            segments.append(DSML_BAR)
        segments.append(Text(text=piece.replace("¦", "|")))
    return segments


def tools_block(tools: Sequence[Tool]) -> list[Segment]:
    """What a system message says about tools; nothing without tools. Schemas are text: their bars are not special."""
    if not tools:
        return []
    lines = "\n".join(
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False
        )
        for tool in tools
    )
    return [*markup(_INTRODUCTION), Text(text=lines + _CONCLUSION)]


def calls_block(calls: Sequence[Call]) -> list[Segment]:
    """Calls in the model's own markup; nothing without calls. A call without arguments keeps an empty line."""
    if not calls:
        return []
    block = markup(CALLS_OPENER)
    for call in calls:
        block += [*markup("<|invoke name="), Text(text=f'"{call.name}">\n')]
        for number, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            written = value if is_text else json.dumps(value, ensure_ascii=False)
            block += [
                *markup("\n<|parameter name=" if number else "<|parameter name="),
                Text(text=f'"{name}" string="{"true" if is_text else "false"}">{written}'),
                *markup("</|parameter>"),
            ]
        block += markup("\n</|invoke>\n")
    return [*block, *markup("</|tool_calls>")]


def read_tools(value: Any, where: str = "tools") -> tuple[Tool, ...]:
    """Definitions as the OpenAI API has them. Null and an empty list are no tools.

    Raises InputError, naming the definition, for another form, a bad or repeated name, and a schema of no object.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} must be a list, found {type(value).__name__}")
    if len(value) > MAX_TOOLS:
        raise InputError(f"{where} may have {MAX_TOOLS} elements, found {len(value)}")
    tools = tuple(_read_tool(item, f"{where}[{index}]") for index, item in enumerate(value))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise InputError(f"{where}[{index}]: there are two tools named {tool.name}")
        names.add(tool.name)
    return tools


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """(choice, tools that are offered) for the field `tool_choice`; a choice of allowed tools offers only those.

    Raises InputError for an unknown form, and for a tool that is not defined.
    """
    offered = tuple(tools)
    if value is None:
        return AUTO, offered
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        value, offered = _allowed_tools(value.get("allowed_tools", value), offered)
    if isinstance(value, Mapping):
        name = _function_of(value, "tool_choice").get("name")
        if name not in {tool.name for tool in offered}:
            raise InputError(f"tool_choice: no tool is named {name!r}")
        return ToolChoice(mode="required", name=name), offered
    if value not in ("none", "auto", "required"):
        raise InputError(f"tool_choice must be none, auto, required or a function, found {value!r}")
    if value == "required" and not offered:
        raise InputError("tool_choice is required, and no tools are given")
    return ToolChoice(mode=value), offered


def read_calls(value: Any, where: str) -> tuple[Call, ...]:
    """Calls of an assistant message (`tool_calls`). Raises InputError naming the call."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} must be a list, found {type(value).__name__}")
    calls: list[Call] = []
    for index, item in enumerate(value):
        place = f"{where}[{index}]"
        function = _function_of(item, place)
        name, call_id = function.get("name"), item.get("id")
        if not isinstance(name, str) or not name:
            raise InputError(f"{place}.function.name must be a non-empty string")
        if call_id is not None and not isinstance(call_id, str):
            raise InputError(f"{place}.id must be a string")
        if call_id is not None and call_id in {call.id for call in calls}:
            raise InputError(f"{place}.id: two calls have the id {call_id[:64]!r}")
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        calls.append(Call(id=call_id, name=check_encodable(name, place), arguments=arguments))
    return tuple(calls)


def strict_json(text: str) -> Any:
    """Parsed JSON. Raises ValueError for what is no JSON, NaN and infinities among it, however they are written."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _read_tool(item: Any, where: str) -> Tool:
    function = _function_of(item, where)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InputError(f"{where}.function.name must be 1 to 64 letters, digits, _ or -, found {name!r:.80}")
    if description is not None and not isinstance(description, str):
        raise InputError(f"{where}.function.description must be a string")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InputError(f"{where}.function.parameters must be an object")
    if parameters and parameters.get("type", "object") != "object":
        raise InputError(f"{where}.function.parameters.type must be object, found {parameters.get('type')!r:.80}")
    if function.get("strict"):
        _check_strict(parameters or {}, f"{where}.function.parameters")
    try:
        written = json.dumps(parameters or {}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}.function.parameters: the schema is not JSON") from error
    check_encodable(written, f"{where}.function.parameters")
    return Tool(name=name, description=check_encodable(description or "", where), parameters=parameters or {})


def _check_strict(parameters: Mapping[str, Any], where: str) -> None:
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    missing = [name for name in properties if name not in required]
    if missing:
        raise InputError(f"{where}: strict needs every property in required, {missing[0]!r:.80} is not")


def _function_of(item: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise InputError(f"{where} must be an object, found {type(item).__name__}")
    kind = item.get("type", "function")
    if kind != "function":
        raise InputError(f"{where}.type must be function, found {kind!r:.80}")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{where}.function must be an object")
    return function


def _allowed_tools(value: Any, tools: tuple[Tool, ...]) -> tuple[str, tuple[Tool, ...]]:
    items, mode = (value.get("tools"), value.get("mode")) if isinstance(value, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(items, list | tuple):
        raise InputError("tool_choice.allowed_tools needs a mode (auto or required) and tools")
    allowed = {_function_of(item, "tool_choice.allowed_tools.tools").get("name") for item in items}
    unknown = allowed - {tool.name for tool in tools}
    if unknown:
        raise InputError(f"tool_choice.allowed_tools: no tool is named {unknown.pop()!r:.80}")
    return mode, tuple(tool for tool in tools if tool.name in allowed)


def _arguments(value: Any, where: str) -> Mapping[str, Any]:
    """Arguments by name. What is no JSON object is kept as one parameter `arguments` with the raw text."""
    if isinstance(value, Mapping):
        parsed: Any = value
    elif value is None or value == "":
        return {}
    elif isinstance(value, str):
        try:
            parsed = strict_json(value)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            parsed = {"arguments": value}
    else:
        raise InputError(f"{where} must be a string of JSON or an object")
    try:
        check_encodable(json.dumps(parsed, ensure_ascii=False, allow_nan=False), where)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not JSON") from error
    return parsed
