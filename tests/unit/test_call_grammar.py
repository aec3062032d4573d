"""Calls of tools by their grammar: every walk reads back as declared, and what cannot be kept is refused by name."""

import re

import numpy as np
import pytest
from grammar_helpers import conforms, feed, ids_of_bytes, next_texts, read_calls, spelt, walk

from deepspan.core.grammar import Grammar
from deepspan.errors import InputError

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


def test_definitions_that_would_be_repeated_too_often_are_refused(compiler):
    shared = {"thing": {"enum": ["x" * 9000]}}
    properties = {f"p{index}": {"type": "array", "items": {"$ref": "#/$defs/thing"}} for index in range(200)}
    tool = {"name": "f", "parameters": {"properties": properties, "$defs": shared}}
    with pytest.raises(InputError, match="characters"):
        compiler.compile(Grammar.for_calls([tool], is_open=False, single=False))
