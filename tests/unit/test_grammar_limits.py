"""Grammars that would take the process down: chains that overflow a stack, patterns that take all memory."""

import json
import threading

import pytest

from deepspan.core.grammar import Grammar
from deepspan.errors import InputError
from deepspan.text.deep_stack import with_deep_stack
from deepspan.text.grammar import GrammarCompiler

CHAIN = "start: a0\n" + "\n".join(f"a{index}: a{index + 1} /y/" for index in range(4000)) + "\na4000: /x/"


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def test_chain_of_rules_longer_than_any_stack_compiles(compiler):
    assert compiler.compile(Grammar("lark", CHAIN)).matcher().allowed().any()


def _patterns(count):
    return [{"type": "string", "pattern": f"{chr(97 + index % 26)}{index}"} for index in range(count)]


JOINED = {  # schemas that would make the library join very many patterns
    "allOf": {"allOf": _patterns(100)},
    "of properties": {"allOf": [{"properties": {"x": pattern}} for pattern in _patterns(100)]},
    "of references": {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"allOf": [one, {"$ref": f"#/$defs/{i + 1}"}]} for i, one in enumerate(_patterns(40))},
    },
    "multiplied": {"allOf": [{"items": {"allOf": _patterns(4)}}] * 4},
    "by name": {"properties": {"x": {}}, "patternProperties": {f"x|{i}": one for i, one in enumerate(_patterns(20))}},
    "many names": {"patternProperties": {f"^{index}": {} for index in range(200)}},
}


@pytest.mark.parametrize("name", JOINED)
def test_patterns_that_would_take_all_memory_are_refused(compiler, name):
    with pytest.raises(InputError, match=r"allowed|may have"):
        compiler.compile(Grammar.for_schema(JOINED[name]))
    with pytest.raises(InputError, match=r"allowed|may have"):
        compiler.compile(Grammar("lark", f"start: %json {json.dumps(JOINED[name])}"))


def test_regexes_that_would_take_all_memory_are_refused(compiler):
    terminals = " & ".join(f"/.*{index}.*/" for index in range(300))
    with pytest.raises(InputError, match="may have 16 `&`"):
        compiler.compile(Grammar("lark", f"start: A\nA: {terminals}"))


def test_patterns_that_are_not_joined_may_be_many(compiler):
    properties = {f"p{index}": one for index, one in enumerate(_patterns(100))}
    compiler.compile(Grammar.for_schema({"type": "object", "properties": properties, "additionalProperties": False}))
    compiler.compile(Grammar.for_schema({"anyOf": _patterns(30)}))


def test_references_in_a_circle_are_counted_once(compiler):
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "id": {"type": "string", "pattern": "^a+$"}}}
    compiler.compile(Grammar.for_schema(node))


def test_chain_of_references_that_never_ends_is_refused(compiler):
    chain = {str(index): {"items": {"$ref": f"#/$defs/{index + 1}"}} for index in range(3000)}
    with pytest.raises(InputError, match="references"):
        compiler.compile(Grammar.for_schema({"$ref": "#/$defs/0", "$defs": chain}))


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(("raised", "seen"), [(KeyError("x"), KeyError), (PanicException("index"), InputError)])
def test_work_on_a_deep_stack_raises_what_it_raises_but_for_panics(raised, seen):
    def fail():
        raise raised

    with pytest.raises(seen):
        with_deep_stack(fail)


def test_work_on_a_deep_stack_leaves_the_size_of_others():
    before = threading.stack_size()
    assert with_deep_stack(lambda: threading.current_thread().name) == "deepspan-grammar"
    assert threading.stack_size() == before
