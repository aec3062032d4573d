"""Grammars: what may be built and compiled, and what every walk through the allowed tokens spells."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from grammar_helpers import conforms, read_calls
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from deepspan.core.grammar import MAX_DEPTH, MAX_SOURCE_BYTES, Grammar
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError
from deepspan.text import grammar as module
from deepspan.text.grammar import GrammarCompiler, in_reasoning
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["α", 'q"uote', "back\\slash", 7, None]}, "maxItems": 3},
        "nested": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": ["boolean", "null"]}},
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {
    "person": PERSON,
    "list": {"type": "array", "items": {"type": "number", "minimum": -2, "maximum": 2}, "minItems": 2, "maxItems": 4},
    "union": {"anyOf": [{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "boolean"}]},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "constant": {"const": {"a": [1, "x"]}},
}
TOOLS = [
    {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "mode": {"type": "string", "enum": ["fast", "deep <&> slow\nly", "日本"]},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "filters": {"type": "array", "items": {"$ref": "#/$defs/filter"}, "maxItems": 2},
                "code": {"type": "string", "pattern": "^[a-z]+/\\d{2}$", "maxLength": 6},
                "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": None},
            },
            "required": ["query", "filters"],
            "$defs": {
                "filter": {
                    "type": "object",
                    "properties": {"field": {"enum": ["a", "b"]}, "not": {"type": "boolean"}},
                    "required": ["field"],
                    "additionalProperties": False,
                }
            },
        },
    },
    {"name": "now"},
    {"name": "empty-1", "parameters": {"type": "object", "properties": {}, "additionalProperties": True}},
    {"name": "optional", "parameters": {"properties": {"x": {"type": "integer"}, "é y": {"const": True}}}},
]
PARAMETERS = {tool["name"]: tool.get("parameters", {}) for tool in TOOLS}


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A tokenizer whose tokens reach over borders of JSON and of tags."""
    learner = Backend(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 200, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    lines = ['{"name": "ab", "age": 1}</', 'parameter name="query" string="true">fast</', "[1, 2]</invoke>\n<é日本</"]
    learner.train_from_iterator(lines * 20, trainer)
    folder = tmp_path_factory.mktemp("merged")
    write_tiny_tokenizer(folder, learner.to_str())
    return Tokenizer(folder, vision=True)


@pytest.fixture(scope="module", params=["bytes", "merged"])
def vocabulary(request, tokenizer):
    return tokenizer if request.param == "bytes" else request.getfixturevalue("merged")


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return GrammarCompiler(vocabulary)


def walk(compiler, tokenizer, grammar, seed, most=3000):
    """Ids of a random answer without its end; ends and closers are preferred, so that answers are short."""
    matcher, rng, ids = compiler.compile(grammar).matcher(), random.Random(seed), []
    slash, *closers = (ids_of_bytes(tokenizer)[letter] for letter in b'/<"}]')
    ends = {tokenizer.special.eos, tokenizer.special.dsml, slash}
    while len(ids) < most:
        allowed = matcher.allowed()
        near = [token for token in ends if allowed[token]] if rng.random() < 0.5 else []
        near = near or [token for token in closers if allowed[token] and rng.random() < 0.2]
        token = rng.choice(near or np.flatnonzero(allowed).tolist())
        matcher.accept(token)
        if token == tokenizer.special.eos:
            assert np.flatnonzero(matcher.allowed()).tolist() == [token]
            return ids
        assert token not in tokenizer.special.hidden
        ids.append(token)
    raise AssertionError("the answer does not end")


def ids_of_bytes(tokenizer):
    texts = {tokenizer.bytes_of(token): token for token in range(tokenizer.vocab_size) if tokenizer.has_id(token)}
    return [texts[bytes([value])] for value in range(256)]


def spelt(tokenizer, ids):
    return b"".join(tokenizer.bytes_of(token) for token in ids).decode("utf-8")  # strict: no broken characters


def feed(compiler, tokenizer, grammar, text):
    """A matcher after `text`."""
    matcher = compiler.compile(grammar).matcher()
    for token in tokenizer.encode_raw(text):
        assert matcher.allowed()[token], tokenizer.bytes_of(token)
        matcher.accept(token)
    return matcher


def next_texts(tokenizer, matcher):
    return {tokenizer.bytes_of(int(token)) for token in np.flatnonzero(matcher.allowed())}


# --- JSON


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", SCHEMAS)
def test_walk_of_a_schema_is_json_that_fits_it(compiler, vocabulary, name, seed):
    text = spelt(vocabulary, walk(compiler, vocabulary, Grammar.for_schema(SCHEMAS[name]), seed))
    assert conforms(json.loads(text), SCHEMAS[name]), text


@pytest.mark.parametrize("seed", range(8))
def test_walk_of_json_object_is_an_object_without_needless_space(compiler, vocabulary, seed):
    text = spelt(vocabulary, walk(compiler, vocabulary, Grammar("json_object"), seed))
    assert isinstance(json.loads(text), dict)
    outside = re.sub(r'"(\\.|[^"\\])*"', "", text)
    assert re.search(r"\s", re.sub(r"[,:] (?!\s)", "", outside)) is None


def test_end_is_allowed_when_json_is_complete_and_then_alone(compiler, vocabulary, tokenizer):
    eos = vocabulary.special.eos
    one = Grammar.for_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert not feed(compiler, vocabulary, one, '{"a": 1').allowed()[eos]
    number = feed(compiler, vocabulary, Grammar.for_schema({"type": "integer"}), "12").allowed()
    assert number[eos]
    assert number.sum() > 1
    closed = Grammar.for_schema({"type": "array", "maxItems": 0})
    assert np.flatnonzero(feed(compiler, vocabulary, closed, "[]").allowed()).tolist() == [eos]


def test_control_tokens_are_never_allowed_inside_strings(compiler, vocabulary):
    allowed = feed(compiler, vocabulary, Grammar("json_object"), '{"k": "some text').allowed()
    assert not allowed[sorted(vocabulary.control_ids)].any()
    assert allowed[vocabulary.encode_raw("x")[0]]


def test_text_that_spells_a_control_token_is_ordinary_text(compiler, vocabulary):
    matcher = compiler.compile(Grammar("regex", "<think>.*")).matcher()
    assert not matcher.allowed()[vocabulary.special.think_open]
    for value in b"<think>":
        matcher.accept(ids_of_bytes(vocabulary)[value])
    assert not matcher.allowed()[sorted(vocabulary.control_ids - {vocabulary.special.eos})].any()


def test_lone_surrogates_cannot_be_written_in_json(compiler, vocabulary):
    assert b"d" not in next_texts(vocabulary, feed(compiler, vocabulary, Grammar("json_object"), '{"\\u'))


def test_keys_come_in_the_order_of_the_schema(compiler, vocabulary):
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    feed(compiler, vocabulary, Grammar.for_schema(schema | {"additionalProperties": False}), '{"b": 1, "a": 2}')


# --- other kinds


@pytest.mark.parametrize("seed", range(8))
def test_walk_of_choices_is_one_of_them(compiler, vocabulary, seed):
    choices = ["yes", "yes, but", "nö", "日本語", "👍🏽", 'a "b"\n', "<think>"]
    assert spelt(vocabulary, walk(compiler, vocabulary, Grammar.for_choices(choices), seed)) in choices


def test_choice_that_another_one_continues_may_end_or_go_on(compiler, vocabulary):
    allowed = feed(compiler, vocabulary, Grammar.for_choices(["yes", "yes, but"]), "yes").allowed()
    assert allowed[vocabulary.special.eos]
    assert allowed[vocabulary.encode_raw(",")[0]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pattern", [r"[a-c]{3}/\n\d?\w", r"(ä|é日){1,3}", r"^x+$"])
def test_walk_of_a_regex_matches_from_end_to_end(compiler, vocabulary, pattern, seed):
    assert re.fullmatch(pattern, spelt(vocabulary, walk(compiler, vocabulary, Grammar("regex", pattern), seed)))


@pytest.mark.parametrize("seed", range(4))
def test_walk_of_a_lark_grammar_follows_it(compiler, vocabulary, seed):
    source = 'start: sum\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/\n'
    text = spelt(vocabulary, walk(compiler, vocabulary, Grammar("lark", source), seed))
    assert re.fullmatch(r"[1-9]\d?(\+[1-9]\d?)+", text)


def test_lark_grammar_may_name_a_control_token_but_no_hidden_one(compiler, vocabulary):
    special = vocabulary.special
    matcher = compiler.compile(Grammar("lark", "start: <think> /a*/ </think>")).matcher()
    assert np.flatnonzero(matcher.allowed()).tolist() == [special.think_open]
    anything = compiler.compile(Grammar("lark", "start: <[*]>")).matcher().allowed()
    assert not anything[sorted(special.hidden - {special.eos})].any()
    with pytest.raises(InputError, match="no token can follow"):
        compiler.compile(Grammar("lark", "start: <｜User｜>"))


# --- calls


@pytest.mark.parametrize("seed", range(25))
def test_walk_of_calls_reads_back_as_declared(compiler, vocabulary, seed):
    is_open, single = seed % 2 == 0, seed % 3 == 0
    grammar = Grammar.for_calls(TOOLS, is_open=is_open, single=single)
    calls = read_calls(spelt(vocabulary, walk(compiler, vocabulary, grammar, seed)), is_open=is_open)
    assert not single or len(calls) == 1
    for name, arguments in calls:
        parameters = PARAMETERS[name]
        declared = list(parameters.get("properties", {}))
        assert list(arguments) == [key for key in declared if key in arguments]
        assert conforms(arguments, parameters | {"additionalProperties": False}), arguments


def test_string_of_a_call_cannot_hold_the_control_token(compiler, vocabulary):
    grammar = Grammar.for_calls(TOOLS, is_open=True, single=True)
    begin = '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">a < b "c"\n</x> '
    allowed = feed(compiler, vocabulary, grammar, begin).allowed()
    assert not allowed[sorted(vocabulary.control_ids)].any()
    closing = feed(compiler, vocabulary, grammar, begin + "</").allowed()
    assert closing[vocabulary.special.dsml]
    after = feed(compiler, vocabulary, grammar, begin + "</｜DSML｜")
    assert all(b"parameter>\n".startswith(text) for text in next_texts(vocabulary, after))


def test_after_the_block_only_the_end_follows(compiler, vocabulary):
    block = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    matcher = feed(compiler, vocabulary, Grammar.for_calls(TOOLS, is_open=False, single=False), block)
    assert np.flatnonzero(matcher.allowed()).tolist() == [vocabulary.special.eos]


def test_single_call_ends_the_block(compiler, vocabulary):
    call = '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
    one = feed(compiler, vocabulary, Grammar.for_calls(TOOLS, is_open=True, single=True), call)
    many = feed(compiler, vocabulary, Grammar.for_calls(TOOLS, is_open=True, single=False), call)
    for matcher in (one, many):
        matcher.accept(ids_of_bytes(vocabulary)[ord("<")])
        assert matcher.allowed()[ids_of_bytes(vocabulary)[ord("/")]]
    assert not one.allowed()[vocabulary.special.dsml]
    assert many.allowed()[vocabulary.special.dsml]


VALUES = {  # schema of a parameter -> forms it may be written in
    "any": (True, {"true", "false"}),
    "nullable": ({"type": ["string", "null"]}, {"true", "false"}),
    "values": ({"enum": ["a", 1]}, {"true", "false"}),
    "reference": ({"$ref": "#/$defs/text"}, {"true"}),
    "wrapped": ({"allOf": [{"$ref": "#/$defs/text"}], "description": "x"}, {"true"}),
    "constants": ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]}, {"true", "false"}),
    "number": ({"type": "number", "format": "int32"}, {"false"}),
    "dated": ({"type": "string", "format": "date-time"}, {"true"}),
    "untyped": ({"properties": {"y": {"$ref": "#/$defs/text"}}, "x-order": 3}, {"true", "false"}),
    "unknown words": ({"$ref": "#/$defs/text", "nullable": True, "default": "a"}, {"true"}),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_of_a_parameter_is_raw_if_it_is_a_string_and_json_otherwise(compiler, vocabulary, name):
    schema, forms = VALUES[name]
    parameters = {"properties": {"x": schema}, "required": ["x"], "$defs": {"text": {"type": "string"}}}
    grammar = Grammar.for_calls([{"name": "f", "parameters": parameters}], is_open=True, single=True)
    begin = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="'
    following = next_texts(vocabulary, feed(compiler, vocabulary, grammar, begin))
    assert {form for form in ("true", "false") if form[:1].encode() in following} == forms


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}}, "not"),
        ({"type": "string", "pattern": "^a|b$"}, "anchors"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{}, {"type": "string"}]}, "allOf"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
        ({"$ref": "#/properties/x"}, "circle"),
        ({"$ref": "https://example.org/x"}, "must lead"),
        ({"$ref": "#/$defs/y"}, "nowhere"),
        ({"enum": ["a"], "pattern": "a"}, "beside"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
        (False, "no value"),
        (3, "must be an object"),
    ],
)
def test_parameter_that_cannot_be_kept_is_refused_by_name(compiler, schema, reason):
    tool = {"name": "f", "parameters": {"properties": {"x": schema}, "required": ["x"]}}
    with pytest.raises(InputError, match=f"tool f: parameter 'x': .*{re.escape(reason)}"):
        compiler.compile(Grammar.for_calls([tool], is_open=False, single=False))


@pytest.mark.parametrize(
    "parameters", [{"minProperties": 2}, {"type": "array"}, {"required": "x"}, {"properties": {'a"b': {}}}, {"if": {}}]
)
def test_parameters_that_cannot_be_kept_are_refused(compiler, parameters):
    with pytest.raises(InputError, match="tool f"):
        compiler.compile(Grammar.for_calls([{"name": "f", "parameters": parameters}], is_open=False, single=False))


# --- refusals


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json", "{}", "kind must be"),
        ("regex", "", "not be empty"),
        ("json_object", "{}", "be empty"),
        ("regex", 3, "must be text"),
        ("regex", "\ud800", "surrogate"),
        ("regex", "a" * (MAX_SOURCE_BYTES + 1), "bytes"),
        ("json_schema", "[", "not JSON"),
        ("json_schema", "true", "must be an object"),
        ("json_schema", '{"const": NaN}', "NaN"),
        ("json_schema", '{"const": 1e999}', "Out of range"),
        ("json_schema", '{"const": "\\ud800"}', "surrogates"),
        ("json_schema", '{"a":' * 65 + "1" + "}" * 65, f"{MAX_DEPTH} deep"),
        ("json_schema", '{"a":' * 40000, f"{MAX_DEPTH} deep"),
        ("choice", '["a", ""]', "choices must"),
        ("choice", "[]", "choices must"),
        ("choice", '"a"', "choices must"),
        ("calls", "[]", "calls must"),
        ("calls", '{"tools": [], "open": true, "single": false}', "at least one"),
        ("calls", '{"tools": [{"name": "f"}], "open": 1, "single": false}', "open must"),
        ("calls", '{"tools": [{"name": "a b"}], "open": true, "single": false}', "name must"),
        ("calls", '{"tools": [{"name": "f"}, {"name": "f"}], "open": true, "single": false}', "two tools"),
        ("calls", '{"tools": [{"name": "f", "parameters": 1}], "open": true, "single": false}', "parameters must"),
    ],
)
def test_grammar_that_is_none_is_refused_when_built(kind, source, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        Grammar(kind, source)


def test_grammar_as_deep_as_allowed_is_built():
    Grammar("json_schema", '{"a":' * 64 + "1" + "}" * 64)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", "a\\", "escape"),
        ("regex", "(?-u:\\xff)", "UTF-8"),
        ("regex", "[^\\x00-\\x{10FFFF}]", "nothing satisfies it"),
        ("lark", "start: x", 'line 1: unknown name: "x"'),
        ("lark", "begin: /a/", "start"),
        ("lark", "start: start", "nothing satisfies it"),
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
        ("json_schema", '{"type": "object", "not": {}}', "Unimplemented keys"),
        ("json_schema", '{"type": "string", "format": "unheard-of"}', "Unknown format"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "example.org"),
        ("json_schema", '{"$ref": "#"}', "nothing satisfies it"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}', "oneOf"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"),
    ],
)
def test_grammar_that_cannot_be_kept_is_refused_with_the_reason(compiler, kind, source, reason):
    with pytest.raises(InputError, match=re.escape(reason)) as refusal:
        compiler.compile(Grammar(kind, source))
    assert len(str(refusal.value)) < 400
    assert "no_forcing" not in str(refusal.value)


def test_definitions_that_would_be_repeated_too_often_are_refused(compiler):
    shared = {"thing": {"enum": ["x" * 9000]}}
    properties = {f"p{index}": {"type": "array", "items": {"$ref": "#/$defs/thing"}} for index in range(200)}
    tool = {"name": "f", "parameters": {"properties": properties, "$defs": shared}}
    with pytest.raises(InputError, match="characters"):
        compiler.compile(Grammar.for_calls([tool], is_open=False, single=False))


def test_token_that_is_not_allowed_is_refused(compiler, vocabulary):
    matcher = compiler.compile(Grammar.for_choices(["ab"])).matcher()
    for token in (vocabulary.special.dsml, vocabulary.special.eos, 10**9):
        with pytest.raises(InputError, match="not allowed"):
            matcher.accept(token)


# --- matchers, cache, parameters


def test_matchers_of_one_grammar_know_nothing_of_each_other(compiler, vocabulary):
    compiled = compiler.compile(Grammar.for_schema(PERSON), count=2)
    first, second, later = compiled.matcher(), compiled.matcher(), compiled.matcher()
    before = second.allowed()
    first.accept(int(np.flatnonzero(first.allowed())[0]))
    assert not np.array_equal(first.allowed(), before)
    assert np.array_equal(second.allowed(), before)
    assert np.array_equal(later.allowed(), before)


def test_matcher_that_takes_tokens_without_masks_allows_the_same(compiler, vocabulary):
    grammar = Grammar.for_calls(TOOLS, is_open=False, single=False)
    ids = walk(compiler, vocabulary, grammar, seed=5)
    asked = compiler.compile(grammar).matcher()
    for place, token in enumerate(ids):
        if place % 17 == 0:
            replayed = compiler.compile(grammar).matcher()
            for earlier in ids[:place]:
                replayed.accept(earlier)
            assert np.array_equal(replayed.allowed(), asked.allowed())
        asked.allowed()
        asked.accept(token)


def test_grammar_is_translated_once_and_forgotten_when_others_come(compiler, monkeypatch):
    translated = []
    monkeypatch.setattr(module, "_translate", lambda grammar, _: translated.append(grammar) or "start: /a/")
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    first, second, third = (Grammar("regex", f"cache{number}") for number in range(3))
    for grammar in (first, first, second, first, third, first, second):
        compiler.compile(grammar)
    assert translated == [first, second, third, second]


def test_threads_compile_at_the_same_time(tokenizer):
    fresh = GrammarCompiler(tokenizer)
    grammars = [Grammar.for_choices([f"text {number % 5}"]) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(lambda grammar: fresh.compile(grammar).matcher().allowed(), grammars))
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<｜Assistant｜><think>", True),
        ("<｜Assistant｜></think>", False),
        ("<｜Assistant｜><think>so far", True),
        ("<｜Assistant｜><think>so</think>And", False),
        ("<｜Assistant｜><think>a<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜></think>", False),
        ("<｜Assistant｜><think>a<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜>", False),
        ("raw", False),
        ("raw<think>", True),
    ],
)
def test_reasoning_is_read_from_the_end_of_the_prompt(tokenizer, prompt, expected):
    assert in_reasoning(tokenizer.encode_raw(prompt), tokenizer.special) is expected


def test_parameters_take_grammars_only():
    assert not SamplingParams(grammar=Grammar("json_object")).is_plain_greedy
    with pytest.raises(InputError, match="grammar must be"):
        SamplingParams(grammar="json")


def test_constructors_refuse_what_is_no_json():
    with pytest.raises(InputError, match="not JSON serializable"):
        Grammar.for_schema({"type": object()})
    with pytest.raises(InputError, match="grammar"):
        Grammar.for_choices([float("nan")])
