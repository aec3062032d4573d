"""Requests of the Messages and Responses forms as chat requests: what means the same, and what has no counterpart."""

import pytest

from deepspan.server.errors import ApiError
from deepspan.server.fields import ChatFields, unknown_fields
from deepspan.server.messages import MessagesFields
from deepspan.server.messages import chat_fields as of_messages
from deepspan.server.responses import ResponsesFields
from deepspan.server.responses import chat_fields as of_responses

PNG = "data:image/png;base64,aaaa"
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
TEXT = {"type": "text", "text": "look"}
HELLO = [{"role": "user", "content": "hello"}]


def messages(*turns, **fields):
    return of_messages(MessagesFields.model_validate({"messages": list(turns), "max_tokens": 5, **fields}))


def responses(*items, **fields):
    return of_responses(ResponsesFields.model_validate({"input": list(items), **fields}))


def test_messages_become_roles_reasoning_calls_and_results():
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    found = messages(
        {"role": "user", "content": [TEXT, {"type": "image", "source": source}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "R", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I call."}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, {"type": "image", "source": source}]},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ]},
        system=[{"type": "text", "text": "S"}], stop_sequences=["E"], top_k=3,
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert found.messages == [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [TEXT, IMAGE]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I call."}],
            "reasoning_content": "R",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [TEXT, IMAGE]},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]
    assert (found.tool_choice, found.parallel_tool_calls, found.stop, found.top_k) == ("required", False, ["E"], 3)
    assert (found.max_completion_tokens, found.thinking) == (5, {"type": "disabled"})


def test_messages_that_end_with_the_assistant_are_continued():
    assert messages(*HELLO, {"role": "assistant", "content": "I"}).messages[-1]["prefix"] is True


def test_messages_effort_counts_where_thinking_is_on():
    thinking = {"type": "adaptive"}
    assert messages(*HELLO, thinking=thinking, output_config={"effort": "max"}).reasoning_effort == "max"
    assert messages(*HELLO, output_config={"effort": "max"}).reasoning_effort is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be user or assistant"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]", "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
         "messages[0].content[0].source", "base64 or url"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "not supported"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "must be auto, any, tool or none"),
    ],
)  # fmt: skip
def test_messages_without_a_counterpart_are_refused_by_name(fields, param, message):
    with pytest.raises(ApiError) as refused:
        of_messages(MessagesFields.model_validate({"messages": HELLO, "max_tokens": 5, **fields}))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert message in refused.value.message


def test_response_items_of_one_turn_become_one_message():
    found = responses(
        {"role": "user", "content": [
            {"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": PNG},
        ]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "R"}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "left alone"}]},
        {"role": "user", "content": "and?"},
        instructions="S", max_output_tokens=7, reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
    )  # fmt: skip
    calls = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": "{}"}} for key, name in ("af", "bg")
    ]
    assert found.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [TEXT, {"type": "input_image", "image_url": PNG, "detail": None}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I call."}],
            "reasoning_content": "R",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "one"}]},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "and?"},
    ]
    assert found.response_format == {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert found.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert (found.reasoning_effort, found.max_completion_tokens) == ("low", 7)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"truncation": "auto"}, "truncation", "prompts are not cut"),
        ({"top_logprobs": 2}, "top_logprobs", "chat/completions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "'input_file'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
         "input[0].content[0]", "need image_url"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "not supported"),
    ],
)  # fmt: skip
def test_responses_without_a_counterpart_are_refused_by_name(fields, param, message):
    with pytest.raises(ApiError) as refused:
        of_responses(ResponsesFields.model_validate({"input": "hello", **fields}))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert message in refused.value.message


def test_fields_that_change_nothing_pass_and_unknown_ones_are_named():
    neutral = {"user": "me", "best_of": 1, "store": False, "audio": None, "modalities": ["text"]}
    fields = ChatFields.model_validate({"messages": HELLO, "shiny": 1, **neutral})
    assert unknown_fields(fields, strict=False) == ["shiny"]
    with pytest.raises(ApiError) as refused:
        unknown_fields(fields, strict=True)
    assert refused.value.param == "shiny"


@pytest.mark.parametrize(
    ("name", "value"),
    [("store", True), ("best_of", 2), ("modalities", ["text", "audio"]), ("prediction", {"type": "content"})],
)
def test_fields_that_would_change_the_answer_are_refused(name, value):
    with pytest.raises(ApiError) as refused:
        unknown_fields(ChatFields.model_validate({"messages": HELLO, name: value}), strict=False)
    assert refused.value.param == name
