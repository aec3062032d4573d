"""Grammars: what may be built and compiled, and what every walk through the allowed tokens spells."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from grammar_helpers import conforms, feed, ids_of_bytes, next_texts, spelt, walk

from deepspan.core.grammar import MAX_DEPTH, MAX_SOURCE_BYTES, Grammar
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError
from deepspan.text import grammar as module
from deepspan.text.grammar import GrammarCompiler, in_reasoning

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


def test_token_that_is_not_allowed_is_refused(compiler, vocabulary):
    for token in (vocabulary.special.dsml, vocabulary.special.eos, 10**9):
        matcher = compiler.compile(Grammar.for_choices(["ab"])).matcher()
        with pytest.raises(InputError, match="not allowed"):
            matcher.accept(token)
        with pytest.raises(InputError):
            matcher.accept(vocabulary.special.eos)
        with pytest.raises(InputError):
            matcher.allowed()


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
    grammar = Grammar.for_schema(PERSON)
    ids = walk(compiler, vocabulary, grammar, seed=5)
    asked = compiler.compile(grammar).matcher()
    for place, token in enumerate(ids):
        if place % 7 == 0:
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
        ("raw<think>", False),  # a prompt without a turn: all of its output is text
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
