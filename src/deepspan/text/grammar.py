"""Grammars made ready for one vocabulary: which tokens may come next.

Owns the llguidance library: its view of the vocabulary, the translation of every kind of grammar into its Lark
language, and its matchers. Invariants: a control token comes only where a grammar names it, never as text that spells
it; tokens that are never generated, and ids without a token, are never allowed; JSON is written on one line with `, `
and `: `; what a schema asks and the library cannot keep is an error; a matcher depends on its own tokens only. A
model chooses how text is cut into tokens: nothing is forced.

Compiled where requests are built, `engine.inputs`; matchers are driven by `runtime.guidance`.
"""

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from deepspan.core.grammar import Grammar
from deepspan.errors import InputError
from deepspan.text.call_grammar import calls_lark, json_text
from deepspan.text.deep_stack import with_deep_stack
from deepspan.text.grammar_limits import check_lark_limits, check_schema_limits
from deepspan.text.special import SpecialIds, open_turn
from deepspan.text.tokenizer import Tokenizer

MAX_CACHED = 64
MAX_REASON_CHARS = 300
_HEADER = '%llguidance {"no_forcing": true}\n'
_COPY = re.compile(r"^ *\d+ \|.*$|^ *\^+ *$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_SPECIAL_PREFIX = b"\xff"  # how the library knows control tokens; it is never a byte of text
_LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; the library is set up by the first call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._translated: OrderedDict[Grammar, str] = OrderedDict()

    def compile(self, grammar: Grammar, count: int = 1) -> "VocabularyGrammar":
        """A grammar for one request. count: matchers to make at once, so that the engine need not.

        Raises InputError with the library's reason for a grammar that it cannot keep or that nothing satisfies.
        """
        return with_deep_stack(lambda: self._compile(grammar, count))

    def _compile(self, grammar: Grammar, count: int) -> "VocabularyGrammar":
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer)
            vocabulary = self._vocabulary
            lark = self._translated.get(grammar)
        if lark is None:
            lark = _translate(grammar, vocabulary)
        compiled = VocabularyGrammar(vocabulary, lark)
        compiled.prepare(count)
        with self._lock:  # only what compiles is kept
            self._translated[grammar] = lark
            self._translated.move_to_end(grammar)
            while len(self._translated) > MAX_CACHED:
                self._translated.popitem(last=False)
        return compiled


class VocabularyGrammar:
    """A grammar of one request; see `core.grammar.CompiledGrammar`.

    Every matcher is built anew: copies of one would share the library's automaton, and with it its limits, so that
    one request could exhaust what another needs.
    """

    def __init__(self, vocabulary: "_Vocabulary", lark: str) -> None:
        self._vocabulary, self._lark = vocabulary, lark
        self._ready: deque[GrammarMatcher] = deque()

    @property
    def think_close(self) -> int:
        return self._vocabulary.special.think_close

    def in_reasoning(self, prompt: Sequence[int] | np.ndarray) -> bool:
        return in_reasoning(prompt, self._vocabulary.special)

    def prepare(self, count: int) -> None:
        """Build matchers for later. Raises InputError if the grammar cannot be kept."""
        self._ready.extend(self._build() for _ in range(count))

    def matcher(self) -> "GrammarMatcher":
        try:
            return self._ready.popleft()
        except IndexError:  # a request that was preempted begins again
            return with_deep_stack(self._build)

    def _build(self) -> "GrammarMatcher":
        library = LLMatcher(self._vocabulary.library, self._lark, log_level=0, limits=_LIMITS)
        matcher = GrammarMatcher(library, self._vocabulary)
        matcher.allowed()  # that nothing satisfies a grammar shows only here
        return matcher


class GrammarMatcher:
    """Where one request stands in its grammar; see `core.grammar.Matcher`."""

    def __init__(self, matcher: LLMatcher, vocabulary: "_Vocabulary") -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._check()
        if warnings := matcher.get_grammar_warnings():
            raise InputError(f"grammar: {_shortened(warnings[0])}")

    def allowed(self) -> np.ndarray:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()  # the library answers with the end token alone when something is wrong
        mask = np.unpackbits(packed, count=self._vocabulary.size, bitorder="little").view(bool)
        mask &= ~self._vocabulary.never
        if not mask.any():
            raise InputError("grammar: no token can follow")
        return mask

    def accept(self, token_id: int) -> None:
        self._check()  # one that has failed would take the end token
        if not self._matcher.consume_token(token_id):
            raise InputError(f"grammar: token {token_id} is not allowed: {_shortened(self._matcher.get_error())}")

    def count_allowed(self, tokens: Sequence[int]) -> int:
        known = [0 <= token < self._vocabulary.size and not self._vocabulary.never[token] for token in tokens]
        num_known = known.index(False) if False in known else len(known)
        return self._matcher.validate_tokens(list(tokens[:num_known]))

    def _check(self) -> None:
        if error := self._matcher.get_error():
            raise InputError(f"grammar: {_shortened(error)}")


class _Vocabulary:
    """The library's view of a tokenizer. never: bool [size], tokens that no grammar can allow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special, self.size = tokenizer.special, tokenizer.vocab_size
        self.tokens = [_library_bytes(tokenizer, token_id) for token_id in range(self.size)]
        self.never = np.array([not text for text in self.tokens])
        self.never[sorted(self.special.hidden - {self.special.eos})] = True
        self.eos_token_id, self.bos_token_id = self.special.eos, self.special.bos
        self.special_token_ids = sorted(tokenizer.control_ids)
        self._byte_ids = {text: token_id for token_id, text in enumerate(self.tokens) if len(text) == 1}
        self.library = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        """Some tokens of a text: the library asks for this, and makes no use of it as nothing is forced."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return [self._byte_ids[raw[index : index + 1]] for index in range(len(raw))]


def in_reasoning(prompt: Sequence[int] | np.ndarray, special: SpecialIds) -> bool:
    """Whether what follows a prompt is reasoning."""
    return open_turn(prompt, special)[:1] == [special.think_open]


def _library_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Bytes of a token as the library wants them: control tokens are marked, what is no token has none."""
    if not tokenizer.has_id(token_id):
        return b""
    text = tokenizer.bytes_of(token_id)
    if token_id in tokenizer.control_ids:
        return _SPECIAL_PREFIX + text
    return b"" if _SPECIAL_PREFIX in text else text  # the byte occurs in no text


def _translate(grammar: Grammar, vocabulary: _Vocabulary) -> str:
    """Lark text of a grammar of any kind."""
    try:
        return _HEADER + _rules(grammar, vocabulary)
    except InputError as error:
        raise InputError(f"grammar: {error}") from error


def _rules(grammar: Grammar, vocabulary: _Vocabulary) -> str:
    source = grammar.source
    if grammar.kind == "json_object":
        return f"start: %json {json_text({'type': 'object'})}"
    if grammar.kind == "json_schema":
        schema = json.loads(source)
        _check_schema(schema)  # the library's reason is clearer when nothing surrounds the schema
        return f"start: %json {json_text(schema)}"
    if grammar.kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:
            raise InputError("the pattern ends inside an escape")
        return f"start: /{regex_to_lark(source, 'dw')}/"
    if grammar.kind == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source))
    if grammar.kind == "lark":
        check_lark_limits(source)
        return source
    return calls_lark(json.loads(source), vocabulary.special.dsml, _check_schema)


def _check_schema(schema: dict) -> None:
    check_schema_limits(schema)
    alone = LLMatcher.grammar_from_json_schema(json_text(schema))
    _, messages = LLMatcher.validate_grammar_with_warnings(alone, limits=_LIMITS)
    if messages:
        raise InputError(_shortened(messages[0]))


def _shortened(reason: str) -> str:
    """The library's reason without its copy of the source, and with lines counted as they were given."""
    if reason.startswith("panic"):
        return "it is too large or too complex for the library"
    text = _COPY.sub("", reason).replace("<non-verbose/>", "").replace("NoExtensionBias", "nothing satisfies it")
    text = _PLACE.sub(lambda found: f"line {int(found[1]) - 1}: ", " ".join(text.split()))
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…"
