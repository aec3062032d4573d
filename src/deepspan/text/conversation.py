"""Messages of a chat request, read and sorted into turns.

Owns the roles and the order in which messages may stand. Invariants: a message that has no place is refused with its
index, never left out; every call of a tool has exactly one result before the conversation goes on, and results stand in
the order of their calls. Called by `text.chat`, which lays turns out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspan.errors import InputError
from deepspan.text import special
from deepspan.text.content import read_content
from deepspan.text.segments import Segment, Text, check_encodable
from deepspan.text.switches import ChatOptions
from deepspan.text.tools import Call, read_calls

SYSTEM_ROLES = ("system", "developer")  # developer has the meaning that OpenAI gives it
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", "latest_reminder")


@dataclass(slots=True, kw_only=True)
class UserTurn:
    """One or more user messages in a row; `task` is the internal task that the last one asks for."""

    texts: list[list[Segment]]
    task: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReminderTurn:
    content: list[Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """`is_open`: the answer continues this turn, so nothing closes it."""

    content: list[Segment]
    reasoning: str
    calls: tuple[Call, ...]
    is_open: bool


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages read and sorted: system texts apart, user runs merged.

    waiting: calls of the last assistant turn by number, without a result yet. results: those that came.
    """

    systems: list[list[Segment]] = field(default_factory=list)
    turns: list[UserTurn | ReminderTurn | AssistantTurn] = field(default_factory=list)
    waiting: dict[int, Call] = field(default_factory=dict)
    results: dict[int, list[Segment]] = field(default_factory=dict)


def read_messages(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> Conversation:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of messages")
    if not messages:
        raise InputError("messages is empty")
    conversation = Conversation()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} must be an object, found {type(message).__name__}")
        role = _role(message, where)
        is_last = index == len(messages) - 1
        _check_prefix(message, where, role=role, is_last=is_last)
        if role in SYSTEM_ROLES:
            conversation.systems.append(read_content(message.get("content"), f"{where}.content", images=True))
            continue
        if role == "tool":
            _add_result(conversation, message, where)
            continue
        _close_calls(conversation, where)
        if role == "latest_reminder":
            content = read_content(message.get("content"), f"{where}.content", images=False)
            conversation.turns.append(ReminderTurn(content=content))
        elif role == "user":
            _add_user(conversation, message, where, is_last=is_last)
        else:
            is_open = is_last and (options.ending == "continue" or bool(message.get("prefix")))
            if is_open and options.offered_tools:
                raise InputError(f"{where}: an assistant message cannot be continued where tools are given")
            _add_assistant(conversation, message, where, is_open=is_open)
    _close_calls(conversation, "messages")
    if options.ending == "continue" and _role(messages[-1], "messages[-1]") != "assistant":
        raise InputError("continue_final_message needs an assistant message at the end")
    return conversation


def _role(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where}.role must be one of {', '.join(ROLES)}, found {role!r}")
    if message.get("tools"):
        raise InputError(f"{where}.tools: tools are a field of the request, not of a message")
    return role


def _check_prefix(message: Mapping[str, Any], where: str, *, role: str, is_last: bool) -> None:
    prefix = message.get("prefix")
    if prefix is None or prefix is False:
        return
    if prefix is not True:
        raise InputError(f"{where}.prefix must be true or false, found {prefix!r}")
    if role != "assistant" or not is_last:
        raise InputError(f"{where}.prefix: only an assistant message at the end can be continued")


def _add_user(conversation: Conversation, message: Mapping[str, Any], where: str, *, is_last: bool) -> None:
    content = read_content(message.get("content"), f"{where}.content", images=True)
    task = message.get("task")
    if task is not None:
        if not isinstance(task, str) or task not in special.TASKS:
            raise InputError(f"{where}.task must be one of {', '.join(special.TASKS)}, found {task!r}")
        if not is_last:
            raise InputError(f"{where}.task: only the last message can ask for a task")
    previous = conversation.turns[-1] if conversation.turns else None
    if isinstance(previous, UserTurn):
        previous.texts.append(content)
        previous.task = task
    else:
        conversation.turns.append(UserTurn(texts=[content], task=task))


def _add_assistant(conversation: Conversation, message: Mapping[str, Any], where: str, *, is_open: bool) -> None:
    reasoning = ""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}.{name} must be a string")
        reasoning = reasoning or check_encodable(value or "", f"{where}.{name}")
    if message.get("function_call") is not None:
        raise InputError(f"{where}.function_call is the old form of calls and is not supported: use tool_calls")
    calls = read_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls and is_open:
        raise InputError(f"{where}: a message with calls cannot be continued")
    content = message.get("content")
    if content is None and (reasoning or calls):
        content = ""
    segments = read_content(content, f"{where}.content", images=False)
    conversation.turns.append(AssistantTurn(content=segments, reasoning=reasoning, calls=calls, is_open=is_open))
    conversation.waiting = dict(enumerate(calls))


def _add_result(conversation: Conversation, message: Mapping[str, Any], where: str) -> None:
    call_id, waiting = message.get("tool_call_id"), conversation.waiting
    if not waiting:
        raise InputError(f"{where}: a tool result needs a call before it that has no result yet")
    if call_id is None and len(waiting) == 1:
        numbers = list(waiting)
    else:
        numbers = [number for number, call in waiting.items() if call.id is not None and call.id == call_id]
    if not numbers:
        raise InputError(f"{where}.tool_call_id: no call with the id {call_id!r:.80} waits for a result")
    del waiting[numbers[0]]
    conversation.results[numbers[0]] = [
        Text(text="<tool_result>"),
        *read_content(message.get("content"), f"{where}.content", images=True),
        Text(text="</tool_result>"),
    ]


def _close_calls(conversation: Conversation, where: str) -> None:
    """Make a user turn of the results that came; what a user writes after them joins it."""
    for call in conversation.waiting.values():
        raise InputError(f"{where}: the call of {call.name!r:.80} ({call.id!r:.80}) has no result")
    if conversation.results:
        texts = [segments for _, segments in sorted(conversation.results.items())]
        conversation.turns.append(UserTurn(texts=texts, task=None))
        conversation.results = {}
