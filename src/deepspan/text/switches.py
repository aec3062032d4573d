"""Switches of a chat request that shape the prompt: thinking, tools, response format, how the prompt ends.

Owns `ChatOptions` and the reading of the several names under which clients send the same switch. Null is absent,
unknown fields are left to the server. Called by the server and the Python API; `ChatOptions` is read by `text.chat`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspan.errors import InputError
from deepspan.text.tools import AUTO, Tool, ToolChoice, read_tool_choice, read_tools

Effort = Literal["none", "low", "high", "max"]
Ending = Literal["generate", "continue", "open"]

EFFORTS: Mapping[str, Effort] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
THINKING_TYPES: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What shapes a prompt besides its messages.

    effort: `none` is chat mode (no reasoning); the others think.
    drop_thinking: reasoning of turns before the last user turn is left out.
    response_format: None, "json_object", or a JSON schema; written into the prompt as an instruction.
    ending: `generate` opens an assistant turn after the last message, `continue` leaves the last assistant message
        open (like `prefix: true` on that message), `open` adds nothing after the last message.
    tools: what the model may call. tool_choice: whether it may or must.
    """

    effort: Effort
    drop_thinking: bool = True
    response_format: Literal["json_object"] | Mapping[str, Any] | None = None
    ending: Ending = "generate"
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Tools that the prompt tells of: none if the choice forbids calls."""
        return () if self.tool_choice.mode == "none" else self.tools


def options_of_request(request: Mapping[str, Any], *, default_effort: Effort = "high") -> ChatOptions:
    """Options that the fields of a chat request ask for.

    Raises InputError, naming the field, for a switch of the wrong type or value, and contradictory endings.
    """
    for name in ("functions", "function_call"):
        if request.get(name) is not None:
            raise InputError(f"{name} is the old form of tools and is not supported: use tools and tool_choice")
    choice, tools = read_tool_choice(request.get("tool_choice"), read_tools(request.get("tools")))
    return ChatOptions(
        effort=effort_of_request(request, default_effort=default_effort),
        drop_thinking=_switch(request, "drop_thinking") is not False,
        response_format=_response_format(request.get("response_format")),
        ending=_ending(request),
        tools=tools,
        tool_choice=choice,
    )


def effort_of_request(request: Mapping[str, Any], *, default_effort: Effort = "high") -> Effort:
    """Effort that the switches of a request mean together.

    Read are `reasoning_effort`, `thinking` (an object with a type, or a boolean) and `enable_thinking`, at the top and
    in `chat_template_kwargs`. An explicit off wins over everything, so that a client that turns thinking off is never
    billed for it; a switch that is on brings a server whose default is off to `high`.

    Raises InputError for a boolean given as anything else ("false" would be truthy) and for an unknown effort.
    """
    asked = _effort_value(_first(request, "reasoning_effort"))
    switches = [
        value
        for fields, path in _places(request)
        for name in ("thinking", "enable_thinking")
        if (value := _thinking_value(fields.get(name), f"{path}{name}", objects=name == "thinking")) is not None
    ]
    if asked == "none" or False in switches:
        return "none"
    if asked is not None:
        return asked
    return "high" if switches and default_effort == "none" else default_effort


def _places(request: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Where switches may stand: the request itself, then its template arguments; each with its path."""
    inner = request.get("chat_template_kwargs")
    if inner is None:
        return [(request, "")]
    if not isinstance(inner, Mapping):
        raise InputError("chat_template_kwargs must be an object")
    return [(request, ""), (inner, "chat_template_kwargs.")]


def _first(request: Mapping[str, Any], name: str) -> Any:
    return next((fields[name] for fields, _ in _places(request) if fields.get(name) is not None), None)


def _switch(request: Mapping[str, Any], name: str) -> bool | None:
    value = _first(request, name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, found {value!r}")
    return value


def _effort_value(value: Any) -> Effort | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        raise InputError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, found {value!r}")
    return EFFORTS[value]


def _thinking_value(value: Any, where: str, *, objects: bool) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if objects and isinstance(value, Mapping):
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in THINKING_TYPES:
            raise InputError(f"{where}.type must be one of {', '.join(THINKING_TYPES)}, found {kind!r}")
        return THINKING_TYPES[kind]
    raise InputError(f"{where} must be true or false, found {value!r}")


def _response_format(value: Any) -> Literal["json_object"] | Mapping[str, Any] | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object"
    if kind != "json_schema":
        raise InputError(f"response_format.type must be text, json_object or json_schema, found {kind!r}")
    outer = value.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InputError("response_format.json_schema.schema must be an object")
    return schema


def _ending(request: Mapping[str, Any]) -> Ending:
    generate, resume = _switch(request, "add_generation_prompt"), _switch(request, "continue_final_message")
    if resume:
        if generate:
            raise InputError("add_generation_prompt and continue_final_message cannot both be true")
        return "continue"
    return "open" if generate is False else "generate"
