"""Chat encoding against golden prompts, its laws over random conversations, its switches, its refusals."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspan.errors import InputError
from deepspan.text import special
from deepspan.text.chat import encode_chat, render
from deepspan.text.segments import ImageSlot, Special, Text
from deepspan.text.switches import ChatOptions, effort_of_request, options_of_request

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_chat.json").read_text(encoding="utf-8"))
CHAT = ChatOptions(effort="none")
LOW = ChatOptions(effort="low")
URL = "https://e.com/1.png"


def _user(content, **fields):
    return {"role": "user", "content": content, **fields}


def _assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def _prompt(messages, options=CHAT):
    return render(encode_chat(messages, options))


def _slots(messages):
    return [segment for segment in encode_chat(messages, CHAT) if isinstance(segment, ImageSlot)]


# --- golden prompts


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_encode_golden_messages_equals_prompt(case):
    segments = encode_chat(case["messages"], options_of_request(case["request"]))
    assert render(segments) == case["prompt"]
    assert [segment.source for segment in segments if isinstance(segment, ImageSlot)] == case["image_urls"]


def test_golden_cases_are_all_there():
    assert len({case["name"] for case in GOLDEN}) == 60


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        (
            [_user("a"), {"role": "latest_reminder", "content": "X"}],
            CHAT,
            "<｜User｜>a<｜latest_reminder｜>X<｜Assistant｜></think>",
        ),
        (
            [_user("a"), {"role": "system", "content": "S"}, _user("b")],
            CHAT,
            "S<｜User｜>a\n\nb<｜Assistant｜></think>",
        ),
        ([{"role": "system", "content": "S"}], CHAT, "S<｜Assistant｜></think>"),
        ([{"role": "system", "content": ""}, {"role": "system", "content": "S"}], CHAT, "S<｜Assistant｜></think>"),
        ([_user(""), _user("a")], CHAT, "<｜User｜>\n\na<｜Assistant｜></think>"),
        ([_user([])], CHAT, "<｜User｜><｜Assistant｜></think>"),
        (
            [_user("a"), _assistant("b"), _assistant("c"), _user("d")],
            CHAT,
            "<｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜Assistant｜></think>c<｜end▁of▁sentence｜>"
            "<｜User｜>d<｜Assistant｜></think>",
        ),
        (
            [_user("a"), _assistant("b", reasoning="R")],
            LOW,
            "<｜User｜>a<｜Assistant｜><think>R</think>b<｜end▁of▁sentence｜><｜Assistant｜><think>",
        ),
        (
            [_user("a"), _assistant(None, reasoning="R", reasoning_content=""), _user("b")],
            ChatOptions(effort="low", drop_thinking=False),
            "<｜User｜>a<｜Assistant｜><think>R</think><｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜><think>",
        ),
        (
            [_user("a"), _assistant("b"), _user("c")],
            ChatOptions(effort="low", drop_thinking=False),
            "<｜User｜>a<｜Assistant｜><think></think>b<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜><think>",
        ),
        ([_user("a"), _assistant("", prefix=True)], LOW, "<｜User｜>a<｜Assistant｜><think>"),
        ([_user("a"), _assistant("", reasoning="R", prefix=True)], CHAT, "<｜User｜>a<｜Assistant｜></think>"),
        (
            [_user("a"), _assistant("b")],
            ChatOptions(effort="none", ending="continue"),
            "<｜User｜>a<｜Assistant｜></think>b",
        ),
        ([_user("a")], ChatOptions(effort="none", ending="open"), "<｜User｜>a"),
        ([_user("a"), _user("b", task="title")], CHAT, "<｜User｜>a\n\nb<｜title｜>"),
        (
            [{"role": "system", "content": "S"}, _user("a")],
            ChatOptions(effort="none", response_format="json_object"),
            "S\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
            "Reply with JSON object ONLY.<｜User｜>a<｜Assistant｜></think>",
        ),
    ],
)
def test_encode_conversation_equals_prompt(messages, options, prompt):
    assert _prompt(messages, options) == special.BOS + prompt


# --- images


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"image_url": {"url": URL}},
        {"image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "low"},
        {"type": "image", "image": URL},
    ],
)
def test_encode_image_part_of_any_form_is_a_slot_with_its_source(part):
    assert _slots([_user(["a", part])]) == [ImageSlot(source=URL, where="messages[0].content[1]")]


def test_encode_image_object_is_carried_as_it_is():
    image = object()
    assert _slots([_user([{"type": "image", "image": image}])])[0].source is image


def test_encode_typed_placeholder_is_text_beside_a_real_slot():
    segments = encode_chat([_user([special.IMAGE, {"image_url": URL}])], CHAT)
    assert segments[2:5] == [
        Text(text=special.IMAGE),
        Text(text="\n\n"),
        ImageSlot(source=URL, where="messages[0].content[1]"),
    ]


# --- laws

texts = st.text(max_size=8)
parts = st.one_of(
    texts,
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.just({"type": "image_url", "image_url": {"url": URL}}),
)
contents = st.one_of(texts, st.lists(parts, max_size=3))
user_messages = st.builds(_user, contents)
messages_of_any_role = st.one_of(
    user_messages,
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "latest_reminder"]), texts
    ),
    st.builds(lambda text, why: _assistant(text, reasoning_content=why), texts, texts),
)
conversations = st.lists(messages_of_any_role, min_size=1, max_size=6)
options_of_any_kind = st.builds(
    ChatOptions,
    effort=st.sampled_from(["none", "low", "high", "max"]),
    drop_thinking=st.booleans(),
    response_format=st.sampled_from([None, "json_object", {"type": "object"}]),
)


@given(conversations, options_of_any_kind)
def test_encode_any_conversation_leaves_the_messages_alone(messages, options):
    before = copy.deepcopy(messages)
    encode_chat(messages, options)
    assert messages == before


@given(conversations, options_of_any_kind)
def test_encode_any_conversation_keeps_every_image_and_ends_in_a_header(messages, options):
    segments = encode_chat(messages, options)
    given_images = sum(isinstance(part, dict) and "image_url" in part for m in messages for part in m["content"])
    assert sum(isinstance(segment, ImageSlot) for segment in segments) == given_images
    tag = special.THINK_CLOSE if options.effort == "none" else special.THINK_OPEN
    assert segments[0] == Special(token=special.BOS)
    assert segments[-2:] == [Special(token=special.ASSISTANT), Special(token=tag)]
    assert sum(segment == Special(token=special.BOS) for segment in segments) == 1


@given(conversations, texts, user_messages)
def test_encode_next_round_in_chat_mode_starts_with_this_round_and_its_answer(messages, answer, question):
    following = _prompt([*messages, _assistant(answer), question])
    assert following.startswith(_prompt(messages) + answer + special.EOS)


# --- switches


@pytest.mark.parametrize(
    ("request_fields", "effort"),
    [
        ({}, "high"),
        ({"reasoning_effort": None, "thinking": None, "chat_template_kwargs": None}, "high"),
        ({"reasoning_effort": "none"}, "none"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "medium"}, "high"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"reasoning_effort": "ultra"}, "max"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": False}, "none"),
        ({"enable_thinking": False, "reasoning_effort": "max"}, "none"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, "none"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "none"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "none"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_effort_of_switches_is_their_meaning_together(request_fields, effort):
    assert effort_of_request(request_fields) == effort


@pytest.mark.parametrize(
    ("request_fields", "effort"),
    [({}, "none"), ({"enable_thinking": True}, "high"), ({"reasoning_effort": "low"}, "low")],
)
def test_effort_of_server_that_does_not_think_by_default_is_asked_for(request_fields, effort):
    assert effort_of_request(request_fields, default_effort="none") == effort


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"enable_thinking": "false"}, "enable_thinking must be true or false"),
        ({"enable_thinking": 0}, "enable_thinking must be true or false"),
        ({"enable_thinking": {"type": "enabled"}}, "enable_thinking must be true or false"),
        ({"chat_template_kwargs": {"thinking": "0"}}, r"chat_template_kwargs\.thinking must be"),
        ({"chat_template_kwargs": {"drop_thinking": 1}}, "drop_thinking must be"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"thinking": {"type": "on"}}, r"thinking\.type"),
        ({"thinking": {"type": []}}, r"thinking\.type"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, r"response_format\.type"),
        ({"response_format": "json_object"}, r"response_format\.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, r"json_schema\.schema"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "cannot both"),
        ({"tools": [{}]}, r"tools\[0\]\.function must be an object"),
        ({"tool_choice": "required"}, "tool_choice is required, and no tools are given"),
        ({"functions": []}, "functions is the old form of tools"),
    ],
)
def test_options_of_wrong_switch_are_refused_by_name(request_fields, message):
    with pytest.raises(InputError, match=message):
        options_of_request(request_fields)


def test_options_of_request_read_format_and_ending():
    assert options_of_request({"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"}) == ChatOptions(
        effort="high"
    )
    assert options_of_request({"continue_final_message": True, "add_generation_prompt": False}).ending == "continue"
    assert options_of_request({"add_generation_prompt": False}).ending == "open"


# --- refusals


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of"),
        ([_user("x"), {"role": "critic", "content": "x"}], r"messages\[1\]\.role must be one of"),
        ([_user(None)], r"messages\[0\]\.content is missing or null"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing or null"),
        ([_user(7)], r"messages\[0\]\.content must be a string or a list"),
        ([{"role": "system", "content": None}], r"messages\[0\]\.content is missing"),
        ([_user("x"), _assistant(None)], r"messages\[1\]\.content is missing"),
        ([_user("x"), _assistant("x", reasoning=7)], r"messages\[1\]\.reasoning must be a string"),
        ([_user("x"), _assistant([{"image_url": URL}])], r"messages\[1\]\.content\[0\]: an image cannot stand here"),
        ([_user(["a", {"type": "video_url", "video_url": URL}])], r"messages\[0\]\.content\[1\]: .*'video_url'"),
        ([_user([{}])], r"messages\[0\]\.content\[0\] has no type"),
        ([_user([{"text": "a", "image_url": URL}])], r"content\[0\] has no type"),
        ([_user([{"type": 1}])], r"content\[0\]\.type must be a string"),
        ([_user([None])], r"content\[0\] must be an object or a string"),
        ([_user([{"type": "text"}])], r"content\[0\]\.text must be a string"),
        ([_user([{"type": "image_url", "image_url": None}])], r"content\[0\]\.image_url must be"),
        ([_user([{"type": "image_url", "image_url": {"url": ""}}])], r"content\[0\]\.image_url\.url must be"),
        ([_user([{"image_url": {"url": URL, "detail": "huge"}}])], "detail must be one of auto, low, high"),
        ([_user([{"type": "image", "image": None}])], r"content\[0\]\.image is missing"),
        ([_user("a\ud800")], r"messages\[0\]\.content: lone surrogate U\+D800"),
        ([_user("x"), _assistant("y", prefix=True), _user("z")], r"messages\[1\]\.prefix: only"),
        ([_user("x", prefix=True)], r"messages\[0\]\.prefix: only"),
        ([_user("x"), _assistant("y", prefix="true")], r"messages\[1\]\.prefix must be true or false"),
        ([_user("x", task="sing")], r"messages\[0\]\.task must be one of"),
        ([_user("x", task="query"), _user("y")], r"messages\[0\]\.task: only the last"),
        (
            [_user("x"), {"role": "tool", "content": "r"}],
            r"messages\[1\]: a tool result needs a call before it",
        ),
        (
            [_user("x"), _assistant(None, tool_calls=[{}])],
            r"messages\[1\]\.tool_calls\[0\]\.function must be an object",
        ),
        ([{"role": "system", "content": "", "tools": [{}]}], r"messages\[0\]\.tools: tools are a field of the request"),
    ],
)
def test_encode_message_without_a_place_is_refused_by_place(messages, message):
    with pytest.raises(InputError, match=message):
        encode_chat(messages, CHAT)


def test_encode_continue_without_assistant_at_the_end_is_refused():
    with pytest.raises(InputError, match="needs an assistant message"):
        encode_chat([_user("x")], ChatOptions(effort="none", ending="continue"))


@pytest.mark.parametrize("schema", [{"maximum": float("nan")}, {"enum": {1, 2}}, {"title": "\ud800"}])
def test_encode_schema_that_is_not_json_is_refused(schema):
    with pytest.raises(InputError, match="response_format"):
        encode_chat([_user("x")], ChatOptions(effort="none", response_format=schema))
