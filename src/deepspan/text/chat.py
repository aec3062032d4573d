"""Chat encoding: messages as clients send them -> segments of the model's prompt.

Owns the layout of a prompt: BOS, effort text (thinking only), one system block, turns, and what opens the answer.
Invariants: the caller's messages are never changed; everything a client wrote is `Text` or `ImageSlot`, only the
template writes `Special`; images stand where their author put them; a message that cannot be laid out is refused with
its index, never left out.

Layout of turns: system texts (wherever they stand) are moved to the front and joined by a blank line, which means that
changing a late one changes the whole prefix. Runs of user messages become one user turn. Every assistant turn has its
own header, whatever stands before it.

Called by the server and the Python API, whose result goes to `text.tokenizer`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspan.errors import InputError
from deepspan.text import special
from deepspan.text.content import join, read_content
from deepspan.text.segments import ImageSlot, Segment, Special, Text, check_encodable
from deepspan.text.switches import ChatOptions, refuse_tools

EFFORT_TEXTS = {
    "none": "",
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
        "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
        "scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
        "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
        "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
        "resolve the underlying cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
        "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
    ),
}
JSON_OBJECT_TEXT = (
    "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)
JSON_SCHEMA_TEXT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

SYSTEM_ROLES = ("system", "developer")  # developer has the meaning that OpenAI gives it
ROLES = (*SYSTEM_ROLES, "user", "assistant", "latest_reminder")


@dataclass(slots=True, kw_only=True)
class _UserTurn:
    """One or more user messages in a row; `task` is the internal task that the last one asks for."""

    texts: list[list[Segment]]
    task: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReminderTurn:
    content: list[Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AssistantTurn:
    """`is_open`: the answer continues this turn, so nothing closes it."""

    content: list[Segment]
    reasoning: str
    is_open: bool


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """Messages read and sorted: system texts apart, user runs merged."""

    systems: list[list[Segment]] = field(default_factory=list)
    turns: list[_UserTurn | _ReminderTurn | _AssistantTurn] = field(default_factory=list)


def encode_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> list[Segment]:
    """Lay `messages` (role and content, as in the OpenAI API) out as the model's prompt.

    Image slots come in the order of their images. Adjacent texts are not merged; the tokenizer does that.
    Raises InputError, naming message and part, for anything that has no place in the prompt.
    """
    conversation = _read_messages(messages, options)
    prompt: list[Segment] = [Special(token=special.BOS), Text(text=EFFORT_TEXTS[options.effort])]
    prompt += _system_block(conversation.systems, options)
    last_user = max((i for i, turn in enumerate(conversation.turns) if isinstance(turn, _UserTurn)), default=-1)
    for index, turn in enumerate(conversation.turns):
        match turn:
            case _UserTurn():
                prompt += [Special(token=special.USER), *join(turn.texts)]
            case _ReminderTurn():
                prompt += [Special(token=special.LATEST_REMINDER), *turn.content]
            case _AssistantTurn():
                keep = turn.is_open or not options.drop_thinking or index > last_user
                prompt += _assistant_turn(turn, thinking=options.effort != "none", keep_reasoning=keep)
    prompt += _ending(conversation, options)
    return [segment for segment in prompt if segment != Text(text="")]


def render(segments: Iterable[Segment]) -> str:
    """The prompt as one string, for people and for tests; what the model sees is made by `Tokenizer.encode`."""
    return "".join(_spelling(segment) for segment in segments)


def _spelling(segment: Segment) -> str:
    match segment:
        case Text(text=text):
            return text
        case Special(token=token):
            return token
        case ImageSlot():
            return special.IMAGE


def _read_messages(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> _Conversation:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of messages")
    if not messages:
        raise InputError("messages is empty")
    conversation = _Conversation()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} must be an object, found {type(message).__name__}")
        role = _role(message, where)
        is_last = index == len(messages) - 1
        _check_prefix(message, where, role=role, is_last=is_last)
        if role in SYSTEM_ROLES:
            conversation.systems.append(read_content(message.get("content"), f"{where}.content", images=True))
        elif role == "latest_reminder":
            content = read_content(message.get("content"), f"{where}.content", images=False)
            conversation.turns.append(_ReminderTurn(content=content))
        elif role == "user":
            _add_user(conversation, message, where, is_last=is_last)
        else:
            is_open = is_last and (options.ending == "continue" or bool(message.get("prefix")))
            conversation.turns.append(_read_assistant(message, where, is_open=is_open))
    if options.ending == "continue" and _role(messages[-1], "messages[-1]") != "assistant":
        raise InputError("continue_final_message needs an assistant message at the end")
    return conversation


def _role(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role")
    if role == "tool":
        raise InputError(f"{where}.role: tools and their results are not supported yet")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where}.role must be one of {', '.join(ROLES)}, found {role!r}")
    refuse_tools(message, f"{where}.")
    return role


def _check_prefix(message: Mapping[str, Any], where: str, *, role: str, is_last: bool) -> None:
    prefix = message.get("prefix")
    if prefix is None or prefix is False:
        return
    if prefix is not True:
        raise InputError(f"{where}.prefix must be true or false, found {prefix!r}")
    if role != "assistant" or not is_last:
        raise InputError(f"{where}.prefix: only an assistant message at the end can be continued")


def _add_user(conversation: _Conversation, message: Mapping[str, Any], where: str, *, is_last: bool) -> None:
    content = read_content(message.get("content"), f"{where}.content", images=True)
    task = message.get("task")
    if task is not None:
        if not isinstance(task, str) or task not in special.TASKS:
            raise InputError(f"{where}.task must be one of {', '.join(special.TASKS)}, found {task!r}")
        if not is_last:
            raise InputError(f"{where}.task: only the last message can ask for a task")
    previous = conversation.turns[-1] if conversation.turns else None
    if isinstance(previous, _UserTurn):
        previous.texts.append(content)
        previous.task = task
    else:
        conversation.turns.append(_UserTurn(texts=[content], task=task))


def _read_assistant(message: Mapping[str, Any], where: str, *, is_open: bool) -> _AssistantTurn:
    reasoning = ""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}.{name} must be a string")
        reasoning = reasoning or check_encodable(value or "", f"{where}.{name}")
    content = message.get("content")
    if content is None and reasoning:
        content = ""
    segments = read_content(content, f"{where}.content", images=False)
    return _AssistantTurn(content=segments, reasoning=reasoning, is_open=is_open)


def _system_block(systems: list[list[Segment]], options: ChatOptions) -> list[Segment]:
    """System texts, then what the request adds to them. Definitions of tools belong between the two."""
    filled = [segments for segments in systems if segments not in ([], [Text(text="")])]
    return [*join(filled), Text(text=_response_format_text(options))]


def _response_format_text(options: ChatOptions) -> str:
    if options.response_format is None:
        return ""
    if options.response_format == "json_object":
        return JSON_OBJECT_TEXT
    try:
        schema = json.dumps(options.response_format, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"response_format: the schema is not JSON ({error})") from error
    return JSON_SCHEMA_TEXT + check_encodable(schema, "response_format")


def _header(*, thinking: bool) -> list[Segment]:
    tag = special.THINK_OPEN if thinking else special.THINK_CLOSE
    return [Special(token=special.ASSISTANT), Special(token=tag)]


def _assistant_turn(turn: _AssistantTurn, *, thinking: bool, keep_reasoning: bool) -> list[Segment]:
    """Header, reasoning where it is kept, content, EOS. Calls of tools belong between content and EOS."""
    reasons = thinking and keep_reasoning
    segments = _header(thinking=reasons)
    if reasons:
        segments.append(Text(text=turn.reasoning))
        # An open turn without content is continued inside its reasoning.
        if not turn.is_open or render(turn.content):
            segments.append(Special(token=special.THINK_CLOSE))
    segments += turn.content
    if not turn.is_open:
        segments.append(Special(token=special.EOS))
    return segments


def _ending(conversation: _Conversation, options: ChatOptions) -> list[Segment]:
    """What opens the answer. A forced call of a tool would be opened here too."""
    last = conversation.turns[-1] if conversation.turns else None
    header = _header(thinking=options.effort != "none")
    if isinstance(last, _UserTurn) and last.task is not None:
        token = Special(token=special.TASKS[last.task])
        return [*header, token] if last.task == "action" else [token]
    if options.ending == "open" or (isinstance(last, _AssistantTurn) and last.is_open):
        return []
    return header
