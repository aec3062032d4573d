"""DeepSeek's own encoder and stream parser as a second opinion, over conversations and outputs made at random.

Where it and the checkpoint's encoding file are known to differ (calls without arguments), the strategies stay away.
"""

import json

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspan.text import special
from deepspan.text.chat import encode_chat, render
from deepspan.text.markup import SPELLINGS
from deepspan.text.parser import OutputParser
from deepspan.text.switches import options_of_request
from deepspan.text.tools import Call, calls_block

MODEL = "tiny"
IMAGE = "data:image/png;base64,aaaa"
NO_IMAGE = "[Unsupported Image]"  # what it writes where V4 has an image: it knows V4 as a text model
ENCODER = recipe.DeepseekV4Encoding()
OPTIONS = recipe.ConversionOptions().with_model_alias(MODEL, recipe.ModelVersion.DeepseekV4Pro)

texts = st.text(st.sampled_from("ab é\n<>\"'{}[]\\杭🙂"), min_size=1, max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.sampled_from([0.5, 1.0, -2.25]), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["a", "b_c", "é", "x"]), values, min_size=1, max_size=4)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.just({"type": "image_url", "image_url": {"url": IMAGE}}),
)
contents = st.one_of(texts, st.lists(parts, min_size=1, max_size=4))
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does é.", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {
            "name": "g",
            "parameters": {"type": "object", "properties": {"b c": {"type": "number", "minimum": 1.0}}},
        },
    },
]


@st.composite
def conversations(draw):
    """Messages that both encoders serve: turns of a user, of an assistant with or without calls, results."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "user", "content": draw(contents)})
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": json.dumps(draw(arguments))}}
            for n in range(draw(st.integers(0, 2)))
        ]
        answer = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(texts)
        messages.append(answer | ({"tool_calls": calls} if calls else {}))
        for one in draw(st.permutations(calls)):
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": draw(contents)})
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(texts)})
    return [*messages, {"role": "user", "content": draw(contents)}]


@st.composite
def requests(draw):
    request = {"model": MODEL, "messages": draw(conversations())}
    if draw(st.booleans()):
        request["tools"] = TOOLS
        request["tool_choice"] = draw(st.sampled_from(["auto", "none"]))
    switch = draw(st.sampled_from(["off", "low", "high", "max"]))
    request |= {"thinking": {"type": "disabled"}} if switch == "off" else {"reasoning_effort": switch}
    if draw(st.booleans()):
        schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
        request["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return request


@settings(max_examples=300, deadline=None)
@given(requests())
def test_encode_any_conversation_equals_the_prompt_of_the_reference(request):
    converted = recipe.ChatCompletionRequest(json.dumps(request)).convert(OPTIONS)
    wanted = ENCODER.render_conversation(converted.conversation).prompt.replace(NO_IMAGE, special.IMAGE)
    assert render(encode_chat(request["messages"], options_of_request(request))) == wanted


@pytest.mark.parametrize("effort", ["none", "low"])
def test_encode_required_call_opens_the_block_in_chat_mode_only(effort):
    request = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS, "tool_choice": "required"}
    prompt = render(encode_chat(request["messages"], options_of_request(request | {"reasoning_effort": effort})))
    assert prompt.endswith("<｜DSML｜tool_calls>\n") == (effort == "none")


def reference_parse(pieces, *, thinking):
    """(reasoning, content, [(name, arguments)]) that the reference makes of an output."""
    switch = {"reasoning_effort": "low"} if thinking else {"thinking": {"type": "disabled"}}
    request = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "q"}], "tools": TOOLS, **switch}
    converted = recipe.ChatCompletionRequest(json.dumps(request)).convert(OPTIONS)
    generator = recipe.ChatCompletionRequest.chunk_generator(converted, "id", MODEL)
    processor = recipe.StreamProcessor(generator, converted.parsing_options)
    chunks = processor.push(recipe.InferenceChunk.ready())
    for piece in pieces:
        chunks += processor.push(recipe.InferenceChunk.text(piece, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    chunks += processor.finish()
    reasoning, content, calls = "", "", {}
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
    return reasoning, content, [(name, json.loads(text)) for name, text in calls.values()]


@st.composite
def outputs(draw):
    """(thinking, pieces of text): reasoning, answer, calls as the model writes them."""
    thinking = draw(st.booleans())
    # Where a text ends with `<`, the reference keeps one of the line breaks that belong to the markup behind it.
    parts = st.one_of(st.just(""), texts.filter(lambda part: not part.rstrip("\n").endswith("<")))
    text = f"{draw(parts)}</think>" if thinking else ""
    text += draw(parts)
    calls = draw(st.lists(st.builds(Call, id=st.none(), name=st.just("f"), arguments=arguments), max_size=3))
    text += render(calls_block(calls))
    return thinking, text


@settings(max_examples=300, deadline=None)
@given(outputs())
def test_parse_any_well_formed_output_equals_the_reference(output):
    thinking, text = output
    wanted = reference_parse([text], thinking=thinking)
    parser = OutputParser({"f": {"type": "object"}}, in_reasoning=thinking)
    marked = text
    for mark, string in SPELLINGS.items():
        marked = marked.replace(string, mark)
    deltas = [*map(parser.push, marked), parser.finish(cut_off=False)]
    found = [(call.name, json.loads(call.arguments)) for call in parser.calls]
    assert ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), found) == wanted
