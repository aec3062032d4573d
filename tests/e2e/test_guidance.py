"""Structured output from random weights: whatever the logits say, answers follow their grammar, alone and batched."""

import json
import re

import numpy as np
import pytest
import torch
from engine_helpers import Service
from grammar_helpers import conforms, read_calls

from deepspan import ChatOptions, SamplingParams
from deepspan.core.grammar import Grammar
from deepspan.engine.inputs import InputBuilder
from deepspan.errors import InputError
from deepspan.runtime.guidance import Guide
from deepspan.text import special
from deepspan.text.tokenizer import Tokenizer
from deepspan.text.tools import Tool, ToolChoice

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["α", "b", None]}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"flag": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "name": "find",
        "parameters": {
            "properties": {
                "text": {"type": "string", "maxLength": 4},
                "mode": {"enum": ["fast", "slow"]},
                "limits": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
            },
            "required": ["text"],
        },
    },
    {"name": "now"},
]
JSON = Grammar.for_schema(SCHEMA)
CALLS = Grammar.for_calls(TOOLS, is_open=False, single=True)
GRAMMARS = {
    "schema": JSON,
    "calls": CALLS,
    "choice": Grammar.for_choices(["red", "green", "grün", "blau, oder auch nicht"]),
    "regex": Grammar("regex", r"[A-F]{2}-\d{2,4}"),
    "lark": Grammar("lark", 'start: item ("," item){1,3}\nitem: /[a-z]{1,3}/'),
}
WAYS = {"greedy": {}, "warm": {"temperature": 1.0, "seed": 5}, "hot": {"temperature": 20.0, "seed": 6, "top_p": 0.99}}


def check(kind, output):
    assert output.finish_reason == "stop", output
    text = output.text
    if kind == "schema":
        assert conforms(json.loads(text), SCHEMA), text
    elif kind == "calls":
        ((name, arguments),) = read_calls(text)
        parameters = {tool["name"]: tool.get("parameters", {}) for tool in TOOLS}[name]
        assert conforms(arguments, parameters | {"type": "object", "additionalProperties": False}), text
    elif kind == "choice":
        assert text in json.loads(GRAMMARS[kind].source)
    else:
        assert re.fullmatch({"regex": r"[A-F]{2}-\d{2,4}", "lark": r"[a-z]{1,3}(,[a-z]{1,3}){1,3}"}[kind], text), text


def params(grammar=None, **given):
    return SamplingParams(**{"max_tokens": 400, "grammar": grammar} | given)


def ask(llm, prompt, grammar=None, **given):
    return llm.generate(prompt, params(grammar, **given))[0]


# --- answers follow their grammar


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_answer_follows_its_grammar_and_ends_by_itself(llm, kind, way):
    for number in range(2):
        check(kind, ask(llm, f"prompt {number}", GRAMMARS[kind], **WAYS[way]))


def test_answer_without_bounds_is_json_as_far_as_it_goes(llm):
    output = ask(llm, "hello", Grammar("json_object"), temperature=3.0, seed=1, logit_bias={3: 0.0}, max_tokens=60)
    assert output.text.startswith("{")
    nudged = {llm.tokenizer.encode_raw(letter)[0]: 30.0 for letter in '"}'}
    ended = ask(llm, "hello", Grammar("json_object"), temperature=3.0, seed=1, logit_bias=nudged)
    assert ended.finish_reason == "stop"
    assert isinstance(json.loads(ended.text), dict)


@pytest.mark.parametrize("way", WAYS)
def test_batch_of_mixed_requests_equals_each_alone(llm, way):
    asked = [(kind, params(grammar, **WAYS[way])) for kind, grammar in GRAMMARS.items()]
    asked += [("free", params(max_tokens=20, **WAYS[way])), ("schema", asked[0][1]), ("free", params(max_tokens=3))]
    requests = [llm.prompt_request(f"prompt of {kind}", one) for kind, one in asked]
    alone = [llm.generate(f"prompt of {kind}", one)[0] for kind, one in asked]
    batch = llm._finish(requests)
    assert [output.token_ids for output in batch] == [output.token_ids for output in alone]
    for (kind, _), output in zip(asked, batch, strict=True):
        if kind != "free":
            check(kind, output)


def test_choices_of_a_request_each_follow_the_grammar(llm):
    outputs = llm._finish([llm.prompt_request("many", params(JSON, n=4, temperature=2.0, seed=3))])
    for output in outputs:
        check("schema", output)
    assert len({output.token_ids for output in outputs}) == 4
    assert outputs[0].token_ids == ask(llm, "many", JSON, temperature=2.0, seed=3).token_ids


def test_cached_prefix_changes_nothing(llm):
    prompt = "a prompt that is long enough to fill some blocks of the cache " * 6
    first, second = (ask(llm, prompt, JSON, temperature=1.0, seed=9) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.num_cached_tokens > first.num_cached_tokens


def test_logprobs_are_those_before_the_mask(llm):
    free = ask(llm, "same", max_tokens=1, logprobs=5)
    bound = ask(llm, "same", GRAMMARS["choice"], logprobs=5)
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].rank > 1


# --- preemption


@pytest.mark.parametrize("way", WAYS)
def test_preempted_requests_go_on_where_they_were(tiny_models, way):
    model = tiny_models(ratios=(0, 4, 16, 4))
    builder = InputBuilder(model.config, Tokenizer(model.folder, vision=True))
    requests = [
        builder.from_prompt(f"prompt of {kind}", params(GRAMMARS[kind], max_tokens=200, **WAYS[way]))
        for kind in GRAMMARS
    ]
    calm = Service(model, chunk_tokens=16)
    expected = [calm.finish(calm.core.add(request))[0] for request in requests]
    service = Service(model, chunk_tokens=16)
    ids = [request_id for request in requests for request_id in service.core.add(request)]

    def disturb(step):
        if step in (3, 4, 9, 15, 30):
            for request_id in ids[step % 2 :: 2] if step != 9 else ids:
                if not service.core.is_finished(request_id):
                    service.preempt(request_id)

    outputs = service.finish(ids, disturb)
    assert service.scheduler.num_preemptions > 5
    for kind, output, calm_output in zip(GRAMMARS, outputs, expected, strict=True):
        check(kind, output)
        assert output.token_ids == calm_output.token_ids


# --- reasoning


@pytest.fixture
def forced(llm, monkeypatch):
    """Make the model want given ids first; what it says afterwards is its own."""

    def install(first):
        forward = llm._runner._forward

        def wanting(inputs, failed):
            found = forward(inputs, failed)
            for chunk, rows in found:
                generated = llm._runner._rows[chunk.row].generated
                if chunk.samples and len(generated) < len(first):
                    rows[-1, first[len(generated)]] = 1e4
            return found

        monkeypatch.setattr(llm._runner, "_forward", wanting)

    return install


@pytest.mark.parametrize("way", WAYS)
def test_reasoning_is_free_and_the_answer_is_not(llm, forced, way):
    reasoning = "I think { that ] it"
    forced([*llm.tokenizer.encode_raw(reasoning), llm.tokenizer.special.think_close])
    output = llm.chat([{"role": "user", "content": "hi"}], params(JSON, **WAYS[way]), ChatOptions(effort="low"))
    assert output.reasoning == reasoning
    check("schema", output)


def test_answer_in_chat_mode_follows_from_the_first_token(llm, forced):
    forced(llm.tokenizer.encode_raw("I think"))
    output = llm.chat([{"role": "user", "content": "hi"}], params(JSON), ChatOptions(effort="none"))
    assert output.reasoning == ""
    check("schema", output)


def test_reasoning_that_the_prompt_has_closed_is_over(llm):
    prompt = special.BOS + special.USER + "hi" + special.ASSISTANT + special.THINK_OPEN + "so" + special.THINK_CLOSE
    check("schema", ask(llm, prompt, JSON))


@pytest.mark.parametrize("effort", ["none", "low"])
def test_required_call_is_read_as_a_call(llm, forced, effort):
    if effort != "none":
        forced([llm.tokenizer.special.think_close])
    tools = tuple(Tool(name=tool["name"], parameters=tool.get("parameters", {})) for tool in TOOLS)
    options = ChatOptions(effort=effort, tools=tools, tool_choice=ToolChoice(mode="required"))
    grammar = Grammar.for_calls(TOOLS, is_open=effort == "none", single=True)
    output = llm.chat([{"role": "user", "content": "hi"}], params(grammar, temperature=1.0, seed=2), options)
    assert (output.text, output.finish_reason) == ("", "stop")
    (call,) = output.calls
    parameters = {tool["name"]: tool.get("parameters", {}) for tool in TOOLS}[call.name]
    assert call.is_complete
    assert conforms(json.loads(call.arguments), parameters | {"additionalProperties": False})


# --- other parameters


def test_complete_answer_ends_before_its_minimum_length(llm):
    output = ask(llm, "hi", Grammar.for_choices(["ab"]), min_tokens=10)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "stop", 3)


def test_answer_that_may_go_on_keeps_its_minimum_length(llm):
    output = ask(llm, "hi", Grammar("regex", "[ab]{1,9}"), min_tokens=7)
    assert len(output.token_ids) >= 8
    assert output.finish_reason == "stop"


def test_bad_words_penalties_and_bias_choose_among_what_is_allowed(llm):
    a = llm.tokenizer.encode_raw("a")[0]
    grammar = Grammar("regex", "[ab]{6}")
    assert ask(llm, "hi", grammar, bad_words=[[a]]).text == "bbbbbb"
    assert ask(llm, "hi", grammar, logit_bias={a: 1000.0}).text == "aaaaaa"
    mixed = ask(llm, "hi", grammar, logit_bias={a: 1000.0}, bad_words=[[a, a]], frequency_penalty=2.0).text
    assert mixed == "ababab"


def test_request_whose_parameters_leave_nothing_fails_alone(llm):
    a = llm.tokenizer.encode_raw("a")[0]
    lost = params(Grammar.for_choices(["xa"]), bad_words=[[a]])
    mate = llm.generate("mate", params(JSON))[0]
    failed, other = llm._finish([llm.prompt_request("hi", lost), llm.prompt_request("mate", params(JSON))])
    assert (failed.finish_reason, failed.text) == ("error", "x")
    assert "bad_words" in failed.error
    assert other.token_ids == mate.token_ids


def test_token_that_the_grammar_refuses_fails_its_request_alone(llm, monkeypatch):
    mate = llm.generate("mate", params(JSON))[0]
    bound = Guide.allowed_mask
    monkeypatch.setattr(Guide, "allowed_mask", lambda self: bound(self) if self is not broken[0] else None)
    broken = [None]
    begin = Guide.of.__func__

    def remember(cls, request, generated, like_V):
        guide = begin(cls, request, generated, like_V)
        if request.params.max_tokens == 399:
            broken[0] = guide
        return guide

    monkeypatch.setattr(Guide, "of", classmethod(remember))
    requests = [llm.prompt_request("hi", params(JSON, max_tokens=399)), llm.prompt_request("mate", params(JSON))]
    failed, other = llm._finish(requests)
    assert failed.finish_reason == "error"
    assert "not allowed" in failed.error
    assert other.token_ids == mate.token_ids


def test_bad_grammar_is_refused_before_anything_is_queued(llm):
    good, bad = params(JSON), params(Grammar("json_schema", '{"type": "objekt"}'))
    with pytest.raises(InputError, match="Invalid type: objekt"):
        llm.generate("hi", bad)
    with pytest.raises(InputError, match="unclosed"):
        llm.chat([{"role": "user", "content": "hi"}], params(Grammar("regex", "[")))
    assert not llm.core.has_work
    check("schema", llm.generate("hi", good)[0])


def test_request_must_bring_its_grammar_compiled(llm):
    request = llm.prompt_request("hi", params(JSON))
    with pytest.raises(InputError, match="compiled"):
        type(request)(token_ids=request.token_ids, kinds=request.kinds, spans=(), images=(), params=request.params)


def test_mask_is_as_wide_as_the_model_and_allows_no_row_beyond_the_tokens(llm):
    request = llm.prompt_request("hi", params(Grammar("lark", "start: <[*]>")))
    guide = Guide.of(request, [], torch.zeros(llm.config.vocab_size))
    mask = guide.allowed_mask()
    assert mask.shape == (llm.config.vocab_size,)
    assert not mask[llm.tokenizer.vocab_size :].any()
    never = [token for token in llm.tokenizer.special.hidden if token != llm.tokenizer.special.eos]
    assert not mask[never].any()
    assert np.flatnonzero(mask.numpy()).size > 256
