"""Chat encoding: messages as clients send them -> segments of the model's prompt.

Owns the layout of a prompt: BOS, effort text (thinking only), one system block, turns, and what opens the answer.
Invariants: the caller's messages are never changed; everything a client wrote is `Text` or `ImageSlot`, only the
template writes `Special`; images stand where their author put them. Messages are read in `text.conversation`.

Layout of turns: system texts (wherever they stand) are moved to the front and joined by a blank line, which means that
changing a late one changes the whole prefix. Runs of user messages become one user turn, and so do the results of
calls with the user's text after them; results stand in the order of their calls. Every assistant turn has its own
header, whatever stands before it. With tools the reasoning of all turns is kept.

Called by the server and the Python API, whose result goes to `text.tokenizer`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspan.errors import InputError
from deepspan.text import special
from deepspan.text.content import join
from deepspan.text.conversation import AssistantTurn, Conversation, ReminderTurn, UserTurn, read_messages
from deepspan.text.segments import ImageSlot, Segment, Special, Text, check_encodable
from deepspan.text.switches import ChatOptions
from deepspan.text.tools import CALLS_OPENER, calls_block, markup, tools_block

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


def encode_chat(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> list[Segment]:
    """Lay `messages` (role and content, as in the OpenAI API) out as the model's prompt.

    Image slots come in the order of their images. Adjacent texts are not merged; the tokenizer does that.
    Raises InputError, naming message and part, for anything that has no place in the prompt.
    """
    conversation = read_messages(messages, options)
    prompt: list[Segment] = [Special(token=special.BOS), Text(text=EFFORT_TEXTS[options.effort])]
    prompt += _system_block(conversation.systems, options)
    last_user = max((i for i, turn in enumerate(conversation.turns) if isinstance(turn, UserTurn)), default=-1)
    for index, turn in enumerate(conversation.turns):
        match turn:
            case UserTurn():
                prompt += [Special(token=special.USER), *join(turn.texts)]
            case ReminderTurn():
                prompt += [Special(token=special.LATEST_REMINDER), *turn.content]
            case AssistantTurn():
                keep = turn.is_open or not options.drop_thinking or index > last_user or bool(options.offered_tools)
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


def _system_block(systems: list[list[Segment]], options: ChatOptions) -> list[Segment]:
    """System texts, then what the request adds to them: tools, then the form of the answer."""
    filled = [segments for segments in systems if segments not in ([], [Text(text="")])]
    return [*join(filled), *tools_block(options.offered_tools), Text(text=_response_format_text(options))]


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


def _assistant_turn(turn: AssistantTurn, *, thinking: bool, keep_reasoning: bool) -> list[Segment]:
    """Header, reasoning where it is kept, content, calls, EOS."""
    reasons = thinking and keep_reasoning
    segments = _header(thinking=reasons)
    if reasons:
        segments.append(Text(text=turn.reasoning))
        # An open turn without content is continued inside its reasoning.
        if not turn.is_open or render(turn.content):
            segments.append(Special(token=special.THINK_CLOSE))
    segments += [*turn.content, *calls_block(turn.calls)]
    if not turn.is_open:
        segments.append(Special(token=special.EOS))
    return segments


def _ending(conversation: Conversation, options: ChatOptions) -> list[Segment]:
    """What opens the answer. Behind reasoning a call that is forced cannot be opened here: a grammar sees to it."""
    last = conversation.turns[-1] if conversation.turns else None
    header = _header(thinking=options.effort != "none")
    if isinstance(last, UserTurn) and last.task is not None:
        token = Special(token=special.TASKS[last.task])
        return [*header, token] if last.task == "action" else [token]
    if options.ending == "open" or (isinstance(last, AssistantTurn) and last.is_open):
        return []
    if options.tool_choice.mode == "required" and options.effort == "none":
        return [*header, *markup(CALLS_OPENER)]
    return header
