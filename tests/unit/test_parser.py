"""Output parsing: golden outputs however they are cut, its tolerance, its typing, what is no call."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspan.text import special
from deepspan.text.markup import BAR, SPELLINGS, THINK_CLOSE, THINK_OPEN
from deepspan.text.parser import OutputParser

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_parse.json").read_text(encoding="utf-8"))
TOOLS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in GOLDEN["tools"]}
CASES = GOLDEN["cases"]
PIECES = [
    *(BAR, THINK_OPEN, THINK_CLOSE, "<", "</", ">", "/>", "\n", "\n\n", " ", "｜", "a", '"', "'", "{", "}", "é", "5"),
    *("tool_calls", "invoke", "parameter", ' name="f"', ' name="x"', ' string="true"', ' string="false"', "tool"),
    *(f"<{BAR}tool_calls>\n", f"<{BAR}invoke name=\"f\">\n", f"</{BAR}invoke>\n", f"</{BAR}tool_calls>"),
    *(f"<{BAR}parameter name=\"x\" string=\"true\">", f"</{BAR}parameter>"),
    f"<{BAR}parameter name=\"n\" string=\"false\">",
]  # fmt: skip


def marked(text):
    """Text with marks in place of the special tokens that the parser knows, without the end."""
    text = text.replace(special.EOS, "")
    for mark, string in SPELLINGS.items():
        text = text.replace(string, mark)
    return text


def parse(pieces, *, tools=TOOLS, in_reasoning=False, cut_off=False, primed=""):
    """(reasoning, content, calls, arguments by the deltas) of an output that comes in pieces."""
    parser = OutputParser(tools, in_reasoning=in_reasoning)
    parser.prime(primed)
    deltas = [*(parser.push(piece) for piece in pieces), parser.finish(cut_off=cut_off)]
    streamed = {}
    for delta in deltas:
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(streamed), "calls come one after the other"
                streamed[call.index] = [call.name, ""]
            streamed[call.index][1] += call.arguments
    assert [[call.name, call.arguments] for call in parser.calls] == list(streamed.values())
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), parser.calls


def call(body, name="f"):
    return f'\n\n<{BAR}tool_calls>\n<{BAR}invoke name="{name}">\n{body}</{BAR}invoke>\n</{BAR}tool_calls>'


def parameter(value, name="x", string="true"):
    return f'<{BAR}parameter name="{name}" string="{string}">{value}</{BAR}parameter>\n'


def arguments(text, **options):
    _, content, calls = parse([text], **options)
    assert content == ""
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_parser_golden_output_whole_and_cut_anywhere_equals_expected(case):
    text, expected = marked(case["output"]), case["expected"]
    in_reasoning = case["prompt_ends_with"] == "<think>"
    whole = reasoning, content, calls = parse([text], in_reasoning=in_reasoning)
    found = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in calls if c.is_complete]
    assert (reasoning or None, content or None, found) == (
        expected["reasoning"],
        expected["content"],
        expected["tool_calls"],
    )
    for place in range(len(text) + 1):
        assert parse([text[:place], text[place:]], in_reasoning=in_reasoning) == whole
    assert parse(list(text), in_reasoning=in_reasoning) == whole


def test_golden_outputs_are_all_there():
    assert len({case["name"] for case in CASES}) == 49


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.lists(st.integers(0, 300)), st.booleans(), st.booleans())
def test_parser_any_output_cut_anywhere_adds_up_to_the_whole(pieces, places, in_reasoning, cut_off):
    text = "".join(pieces)
    whole = parse([text], in_reasoning=in_reasoning, cut_off=cut_off)
    bounds = sorted({0, len(text), *(place for place in places if place < len(text))})
    cut = [text[a:b] for a, b in pairwise(bounds)]
    assert parse(cut, in_reasoning=in_reasoning, cut_off=cut_off) == whole
    assert parse(list(text), in_reasoning=in_reasoning, cut_off=cut_off) == whole
    for found in whole[2]:
        if found.is_complete:
            assert isinstance(json.loads(found.arguments), dict)
    # Marks never come out, and without tools nothing but think tags is markup.
    assert not {BAR, THINK_OPEN, THINK_CLOSE} & set("".join(whole[:2]))
    plain = parse([text], tools=None, in_reasoning=in_reasoning)
    assert plain[2] == ()
    assert (plain[0] + plain[1]).count(special.DSML) == text.count(BAR)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (call(parameter("a")).replace("\n", ""), [("f", {"x": "a"})]),
        (call(parameter("a")).replace(BAR, f"｜{BAR}｜"), [("f", {"x": "a"})]),
        (call(parameter("a")).replace('"', "'"), [("f", {"x": "a"})]),
        (call(parameter("a")).replace('name="f"', "name=“f”"), [("f", {"x": "a"})]),
        (call(f'<{BAR}parameter string="false" name="n">7</{BAR}parameter>', "g"), [("g", {"n": 7})]),
        (
            call(f'<{BAR}parameter name="x" string="true">a\n<{BAR}parameter name="y" string="true">b'),
            [("f", {"x": "a", "y": "b"})],
        ),
        (call(f'<{BAR}parameter name="x" string="true">a\n'), [("f", {"x": "a"})]),
        (call('{"x": [1, {"y": null}]}'), [("f", {"x": [1, {"y": None}]})]),
        (call("", "nobody"), [("nobody", {})]),
        (call(parameter("5", "n"), "g"), [("g", {"n": 5})]),
        (call(parameter("5.5", "n"), "g"), [("g", {"n": "5.5"})]),
        (call(parameter("12345678901234567890123", "n", "false"), "g"), [("g", {"n": 12345678901234567890123})]),
        (call(parameter("1E999", "fl", "false"), "g"), [("g", {"fl": "1E999"})]),
        (call(parameter("true", "b"), "g"), [("g", {"b": True})]),
        (call(parameter("5", "x", "false")), [("f", {"x": "5"})]),
        (
            call(parameter('{"x": 1}', "arguments", "false") + parameter("2", "z")),
            [("f", {"arguments": {"x": 1}, "z": "2"})],
        ),
        (call(parameter('say "hi"\\ \t\x01')), [("f", {"x": 'say "hi"\\ \t\x01'})]),
    ],
)  # fmt: skip
def test_parser_call_written_another_way_is_understood(text, found):
    assert arguments(text) == found


@pytest.mark.parametrize(
    ("schema", "value", "kept"),
    [
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "5"}, "5", "5"),
        ({"type": "boolean"}, "1", "1"),
        ({}, "5", "5"),
        ({"type": "array"}, "[1]", [1]),
    ],
)
def test_parser_text_value_takes_the_type_that_the_schema_leaves(schema, value, kept):
    tools = {"t": {"properties": {"p": schema}}}
    assert arguments(call(parameter(value, "p"), "t"), tools=tools) == [("t", {"p": kept})]


def test_parser_call_without_a_name_is_text_and_others_are_kept():
    nameless = f"<{BAR}invoke>\n{parameter('a')}</{BAR}invoke>\n"
    named = f'<{BAR}invoke name="f">\n{parameter("b")}</{BAR}invoke>\n'
    _, content, calls = parse([f"<{BAR}tool_calls>\n{nameless}{named}</{BAR}tool_calls>"])
    assert content == nameless.strip().replace(BAR, special.DSML)
    assert [json.loads(c.arguments) for c in calls] == [{"x": "b"}]


def test_parser_long_value_of_text_streams_as_it_comes():
    parser = OutputParser(TOOLS, in_reasoning=False)
    parser.push(f'<{BAR}tool_calls>\n<{BAR}invoke name="f">\n<{BAR}parameter name="x" string="true">')
    assert [piece.arguments for piece in parser.push("abc").calls] == ["abc"]
    assert [piece.arguments for piece in parser.push('d"e').calls] == ['d\\"e']


@pytest.mark.parametrize(("cut_off", "is_complete"), [(False, True), (True, False)])
def test_parser_end_after_a_whole_parameter_closes_the_call_unless_a_limit_did_it(cut_off, is_complete):
    _, _, (found,) = parse([call(parameter("a")).split(f"</{BAR}invoke>")[0]], cut_off=cut_off)
    assert found.is_complete == is_complete
    assert found.arguments == ('{"x": "a"}' if is_complete else '{"x": "a"')


def test_parser_end_inside_a_value_never_closes_it():
    text = call(parameter("rm -rf /tmp/x")).split("/x<")[0]
    for cut_off in (False, True):
        _, _, (found,) = parse([text], cut_off=cut_off)
        assert (found.arguments, found.is_complete) == ('{"x": "rm -rf /tmp', False)


def test_parser_prompt_that_opens_calls_or_continues_text_gives_nothing_of_it_out():
    body = call(parameter("a")).removeprefix(f"\n\n<{BAR}tool_calls>\n")
    _, content, calls = parse([body], primed=f"\n\n<{BAR}tool_calls>\n")
    assert content == ""
    assert [c.arguments for c in calls] == ['{"x": "a"}']
    assert parse(["\n  return 1"], primed="def f():")[1] == "\n  return 1"
    assert parse(["\nmore\n", f"{THINK_CLOSE}\nA"], primed="R", in_reasoning=True)[:2] == ("\nmore", "A")


def test_parser_answer_without_tools_holds_nothing_back():
    parser = OutputParser(None, in_reasoning=False)
    assert [parser.push(piece).content for piece in ("\n", "a\n\n", "<", "b")] == ["", "a\n\n", "<", "b"]
