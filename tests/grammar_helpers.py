"""What tests of grammars need: walks through allowed tokens, a small judge of JSON schema, calls read from markup."""

import json
import math
import random
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def conforms(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a value fits a schema, as far as tests use the language."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(conforms(value, one, root) for one in schema["anyOf"])
    types = schema.get("type", list(_TYPES))
    kinds = [types] if isinstance(types, str) else types
    if not any(isinstance(value, _TYPES[k]) and (not isinstance(value, bool) or k == "boolean") for k in kinds):
        return False
    fits = value in schema.get("enum", [value]) and value == schema.get("const", value)
    if isinstance(value, str):
        fits &= schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        fits &= re.search(schema.get("pattern", ""), value) is not None
    elif isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        fits &= all(name in value for name in schema.get("required", []))
        fits &= all(conforms(inner, known.get(name, other), root) for name, inner in value.items())
    elif isinstance(value, list):
        fits &= schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
        fits &= all(conforms(inner, schema.get("items", True), root) for inner in value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        fits &= schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    return fits


_CALL = re.compile(r'<｜DSML｜invoke name="([^"]*)">\n(.*?)</｜DSML｜invoke>\n', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]*)" string="(true|false)">(.*?)</｜DSML｜parameter>\n', re.DOTALL
)


def read_calls(text: str, *, is_open: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every call of a canonical block; asserts that the block is one, to the last character."""
    opener, closer = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
    if not is_open:
        text = text.removeprefix("\n\n")
        assert text.startswith(opener), text
        text = text.removeprefix(opener)
    assert text.endswith(closer), text
    text, calls, place = text.removesuffix(closer), [], 0
    while place < len(text):
        found = _CALL.match(text, place)
        assert found is not None, text[place:]
        calls.append((found[1], _arguments(found[2])))
        place = found.end()
    assert calls
    return calls


def _arguments(body: str) -> dict[str, Any]:
    if body == "\n":
        return {}
    values: dict[str, Any] = {}
    place = 0
    while place < len(body):
        found = _PARAMETER.match(body, place)
        assert found is not None, body[place:]
        assert found[1] not in values
        values[found[1]] = found[3] if found[2] == "true" else json.loads(found[3])
        assert found[2] == "true" or not isinstance(values[found[1]], str), "strings are written raw"
        place = found.end()
    assert values
    return values


def learnt_tokenizer(folder):
    """A tokenizer whose tokens reach over borders of JSON and of tags."""
    learner = Backend(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 200, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    lines = ['{"name": "ab", "age": 1}</', 'parameter name="query" string="true">fast</', "[1, 2]</invoke>\n<é日本</"]
    learner.train_from_iterator(lines * 20, trainer)
    write_tiny_tokenizer(folder, learner.to_str())
    return Tokenizer(folder, vision=True)


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
