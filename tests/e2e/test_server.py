"""The API through the clients that people use: whole and streamed answers, images, tools, structure, other forms."""

import json

import anthropic
import httpx
import openai
import pytest
from server_helpers import NAME, data_url, image_part, picture, serving

from deepspan import SamplingParams
from deepspan.text.switches import ChatOptions

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": [image_part(picture(1)), {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client, messages=QUESTION, **fields):
    return client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=8, **fields)


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# --- chat


def test_chat_answer_equals_the_python_api_and_its_stream(client, llm):
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what?"}]
    alone = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=8))
    whole = ask(client)
    assert whole.choices[0].message.content == alone.text
    assert whole.choices[0].finish_reason == alone.finish_reason
    assert whole.usage.prompt_tokens == alone.num_prompt_tokens
    assert whole.usage.prompt_tokens_details.image_tokens == alone.num_image_tokens > 0
    assert whole.usage.completion_tokens == len(alone.token_ids)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == alone.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == alone.finish_reason
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(alone.token_ids))
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_images_in_two_orders_are_two_prompts(client):
    def order(*seeds):
        parts = [image_part(picture(seed, size=(36, 20))) for seed in seeds]
        found = ask(client, [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}], logprobs=True)
        return [one.logprob for one in found.choices[0].logprobs.content]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 1)


def test_chat_choices_share_the_prompt_and_repeat_with_their_seed(client):
    first = ask(client, n=3, temperature=1.0, seed=5)
    again = ask(client, n=3, temperature=1.0, seed=5)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in ask(client, n=3, temperature=1.0, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert first.usage.prompt_tokens == again.usage.prompt_tokens


def test_chat_logprobs_are_those_of_the_tokens_whole_and_streamed(client):
    found = ask(client, logprobs=True, top_logprobs=3).choices[0]
    entries = found.logprobs.content
    assert len(entries) == 8
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode("utf-8", "replace") == found.message.content
    chunks = ask(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        e for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]


def test_chat_thinking_is_told_apart_and_can_be_left_out(client):
    fields = {"reasoning_effort": "low", "logprobs": True}
    shown = ask(client, **fields).choices[0]
    assert shown.message.content is None
    assert shown.message.reasoning_content == shown.message.reasoning
    assert len(shown.message.reasoning) > 0
    assert len(shown.logprobs.content) == 8
    whole = ask(client, extra_body={"include_reasoning": False}, **fields)
    assert not hasattr(whole.choices[0].message, "reasoning")
    assert whole.choices[0].logprobs.content == []
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8


def test_chat_stop_and_limit_are_told(client):
    text = ask(client, [{"role": "user", "content": "hello"}]).choices[0].message.content
    stop = text[2]
    found = ask(client, [{"role": "user", "content": "hello"}], stop=stop).choices[0]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert found.message.content == text[: text.index(stop)]


# --- tools and structure


def test_tool_call_that_is_required_comes_and_its_result_goes_back(client):
    messages = [{"role": "user", "content": "Weather in Rome?"}]
    fields = {"model": NAME, "tools": TOOLS}
    answer = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200, **fields
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name in ("weather", "now")
    json.loads(call.function.arguments)
    messages.append(answer.message.model_dump(exclude_none=True))
    content = [{"type": "text", "text": "ok"}, image_part(picture(4))]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    after = client.chat.completions.create(messages=messages, tool_choice="none", max_completion_tokens=4, **fields)
    assert after.usage.prompt_tokens_details.image_tokens > 0


def test_tool_call_by_name_streams_the_arguments_that_the_whole_answer_has(client):
    fields = {
        "model": NAME, "messages": [{"role": "user", "content": "w"}], "tools": TOOLS, "max_completion_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert (call.function.name, whole.finish_reason, whole.message.content) == ("weather", "stop", None)
    pieces = [
        piece
        for chunk in client.chat.completions.create(stream=True, **fields)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert (pieces[0].function.name, pieces[0].id[:5]) == ("weather", "call_")
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert {piece.index for piece in pieces} == {0}


def test_json_schema_is_kept_by_any_model(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=NAME, messages=QUESTION, response_format=form, max_completion_tokens=100, temperature=1.0, seed=seed
        ).choices[0]
        found = json.loads(answer.message.content)
        assert set(found) == {"kind", "count"}
        assert found["kind"] in ("cat", "dog")
        assert answer.finish_reason == "stop"


def test_json_schema_beside_tools_is_kept_where_the_model_does_not_call_them(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    reasons = set()
    for seed in range(6):
        choice = client.chat.completions.create(
            model=NAME, messages=QUESTION, response_format=form, tools=TOOLS, parallel_tool_calls=False,
            max_completion_tokens=300, temperature=1.0, seed=seed,
        ).choices[0]  # fmt: skip
        reasons.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            assert set(json.loads(choice.message.content)) == {"kind", "count"}, choice
        else:
            (call,) = choice.message.tool_calls
            assert isinstance(json.loads(call.function.arguments), dict)
    assert reasons == {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[0-9]{3}-[a-c]"}, lambda text: len(text) == 5 and text[:3].isdigit()),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"kind", "count"}),
        ({"grammar": 'start: "a" "b"'}, lambda text: text == "ab"),
    ],
)
def test_structured_outputs_fit(client, structure, fits):
    body = {"structured_outputs": structure}
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, max_completion_tokens=100, extra_body=body)
    assert fits(answer.choices[0].message.content)


# --- raw completions


def test_completions_of_several_prompts_keep_their_order_and_echo(client, llm):
    prompts = ["ab", "cd"]
    alone = llm.generate(prompts, SamplingParams(max_tokens=4))
    found = client.completions.create(model=NAME, prompt=prompts, max_tokens=4, echo=True, logprobs=1)
    assert [choice.text for choice in found.choices] == [p + one.text for p, one in zip(prompts, alone, strict=True)]
    assert found.choices[0].logprobs.token_logprobs[0] is None
    assert len(found.choices[0].logprobs.tokens) == 2 + 4
    streamed = ["", ""]
    for chunk in client.completions.create(model=NAME, prompt=prompts, max_tokens=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [one.text for one in alone]


def test_completions_take_ids_suffixes_and_nothing_but_an_echo(client, llm):
    ids = llm.tokenizer.encode_raw("ab")
    by_text, by_ids = (client.completions.create(model=NAME, prompt=prompt, max_tokens=4) for prompt in ("ab", ids))
    assert by_text.choices[0].text == by_ids.choices[0].text
    only = client.completions.create(model=NAME, prompt="ab", max_tokens=0, echo=True)
    assert (only.choices[0].text, only.usage.completion_tokens) == ("ab", 0)
    middle = llm.generate("<｜fim▁begin｜>a<｜fim▁hole｜>c<｜fim▁end｜>", SamplingParams(max_tokens=4))[0]
    assert client.completions.create(model=NAME, prompt="a", suffix="c", max_tokens=4).choices[0].text == middle.text


# --- responses and messages


def test_responses_answer_and_events_tell_the_same(client, llm):
    fields = {
        "model": NAME, "max_output_tokens": 8, "instructions": "Be brief.",
        "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(picture(1))}, {"type": "input_text", "text": "what?"},
        ]}],
    }  # fmt: skip
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    alone = llm.chat(messages, SamplingParams(max_tokens=8))
    whole = client.responses.create(**fields)
    assert whole.output_text == alone.text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.input_tokens == alone.num_prompt_tokens
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == alone.text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == alone.text


def test_responses_carry_calls_and_their_results(client):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"model": NAME, "tools": tools, "max_output_tokens": 200, "reasoning": {"effort": "none"}}
    asked = [{"role": "user", "content": "now?"}]
    choice = {"type": "function", "name": "weather"}
    whole = client.responses.create(input=asked, tool_choice=choice, **fields)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    events = list(client.responses.create(input=asked, tool_choice=choice, stream=True, **fields))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    item = call.model_dump(include={"type", "name", "arguments", "call_id"})
    after = client.responses.create(input=[*asked, item, result], tool_choice="none", **fields)
    assert after.output[0].type == "message"


def test_messages_answer_and_events_tell_the_same(claude, llm):
    source = {"type": "base64", "media_type": "image/png", "data": data_url(picture(1)).split(",")[1]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    fields = {"model": NAME, "max_tokens": 8, "system": "Be brief.", "messages": [{"role": "user", "content": content}]}
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what?"}]
    alone = llm.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}], SamplingParams(max_tokens=8)
    )
    whole = claude.messages.create(**fields)
    assert (whole.content[0].text, whole.stop_reason) == (alone.text, "max_tokens")
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == alone.num_prompt_tokens
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == alone.text
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert (
        claude.messages.count_tokens(model=NAME, messages=fields["messages"], system="Be brief.").input_tokens
        == alone.num_prompt_tokens
    )


def test_messages_think_and_call_tools(claude):
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    fields = {"model": NAME, "max_tokens": 200, "tools": tools}
    asked = [{"role": "user", "content": "Weather?"}]
    called = claude.messages.create(messages=asked, tool_choice={"type": "tool", "name": "weather"}, **fields)
    (block,) = called.content
    assert (block.type, block.name, called.stop_reason) == ("tool_use", "weather", "tool_use")
    with claude.messages.stream(messages=asked, tool_choice={"type": "tool", "name": "weather"}, **fields) as stream:
        assert stream.get_final_message().content[0].input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        *asked,
        {"role": "assistant", "content": called.model_dump()["content"]},
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(messages=messages, tool_choice={"type": "none"}, **fields | {"max_tokens": 4})
    assert after.content[0].type == "text"
    thought = claude.messages.create(
        model=NAME, max_tokens=8, thinking={"type": "enabled", "budget_tokens": 1024}, messages=asked
    )
    assert thought.content[0].type == "thinking"


# --- what a server tells about itself


def test_models_health_version_and_prompts_are_told(server, client, llm):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (NAME, llm.engine.max_model_len)
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "version" in httpx.get(f"{server.url}/version").json()
    body = {"model": NAME, "messages": QUESTION, "max_completion_tokens": 8}
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=body).json()
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what?"}]
    request = llm.chat_request([{"role": "user", "content": parts}], SamplingParams(), ChatOptions(effort="none"))
    assert rendered["token_ids"] == request.token_ids.tolist()
    assert rendered["features"][0]["hash"] == request.images[0].digest
    counted = httpx.post(f"{server.url}/tokenize", json=body | {"return_token_strs": True}).json()
    assert counted["tokens"] == rendered["token_ids"]
    assert counted["count"] == len(counted["token_strs"]) == ask(client).usage.prompt_tokens
    raw = httpx.post(f"{server.url}/tokenize", json={"prompt": "a<think>b"}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": raw}).json() == {"prompt": "a<think>b"}


def test_metrics_count_what_was_served(server, client):
    def read():
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def grown(name, **labels):
        found = [
            n for n in after if n.startswith(f"vllm:{name}{{") and all(f'{k}="{v}"' in n for k, v in labels.items())
        ]
        (key,) = found
        return after[key] - before.get(key, 0)

    before = read()
    usage = ask(client).usage
    after = read()
    assert grown("request_success_total", finished_reason="length") == 1
    assert grown("generation_tokens_total") == usage.completion_tokens
    assert grown("prompt_tokens_total") + grown("prefix_cache_hits_total") >= usage.prompt_tokens
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == usage.completion_tokens - 1
    assert grown("image_tokens_total") == usage.prompt_tokens_details.image_tokens


def test_prefix_of_a_conversation_is_reported_as_cached(model_folder):
    with serving(model_folder) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        messages = [{"role": "user", "content": "long " * 100}]
        cold, warm = (ask(client, messages).usage for _ in range(2))
        salted = ask(client, messages, extra_body={"cache_salt": "mine"}).usage
        assert (cold.prompt_tokens_details.cached_tokens, salted.prompt_tokens_details.cached_tokens) == (0, 0)
        assert warm.prompt_tokens_details.cached_tokens >= 128
        assert warm.prompt_cache_hit_tokens + warm.prompt_cache_miss_tokens == warm.prompt_tokens
