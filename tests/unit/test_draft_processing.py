"""What acts on logits sees the guesses before each row: penalties, bad words, grammars, lengths and ends.

A made-up model gives logits by context. A text is chosen token by token, then again with guesses judged together: right
ones up to some number, then a wrong one. At temperature 0 both are the same text.
"""

import re

import numpy as np
import pytest
import torch

from deepspan.core.grammar import Grammar
from deepspan.core.media import TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.runtime.choosing import Drafts, RunningRow
from deepspan.runtime.guidance import Guide
from deepspan.text.grammar import GrammarCompiler

V, NEW, PROMPT, EOS = 12, 40, (3, 4, 5, 5), 1


def model(vocabulary=V, seed=0):
    """Logits after some tokens. The last two and the length tell all, and few tokens are likely: texts repeat words."""

    def logits(generated):
        rng = np.random.default_rng((seed, len(generated) % 7, *generated[-2:]))
        likely = 1.2 * (np.arange(vocabulary) % 4 == 0) - 2.0 * (np.arange(vocabulary) == EOS)
        return torch.from_numpy(rng.normal(size=vocabulary) + likely).float()

    return logits


def running(vocabulary=V, grammar=None, compiled=None, **params):
    options = {"grammar": grammar, "temperature": 0.0, "max_tokens": NEW} | params
    prompt = np.asarray(PROMPT, dtype=np.int64)
    wanted = Request(
        token_ids=prompt,
        kinds=np.full(len(prompt), TokenKind.TEXT, dtype=np.int8),
        spans=(),
        images=(),
        params=SamplingParams(**options),
        grammar=compiled,
    )
    forbidden = torch.zeros(vocabulary, dtype=torch.bool)
    guide = Guide.of(wanted, [], forbidden)
    return RunningRow(request=wanted, generated=[], eos=EOS, forbidden=forbidden, guide=guide)


def plainly(row, logits):
    """Text and log-probabilities, one token at a time."""
    told = []
    while not row.generated or not row.is_over:
        told += row.choose(logits(row.generated)[None], Drafts()).logprobs
    return row.generated, told


def with_guesses(row, logits, truth, num_drafts, right, *, in_blocks=False):
    """The same with guesses: `right` of them as in `truth`, the others what the bare logits make likeliest."""
    told, steps = [], 0
    while not row.generated or not row.is_over:
        guesses = list(truth[len(row.generated) : len(row.generated) + num_drafts])
        for index in range(right(steps), len(guesses)):
            before = [*row.generated, *guesses[:index]]
            likeliest = logits(before).argsort(descending=True).tolist()
            guesses[index] = next(token for token in likeliest if token != guesses[index])
        rows = torch.stack([logits([*row.generated, *guesses[:i]]) for i in range(len(guesses) + 1)])
        drafts = Drafts(tokens=tuple(guesses), log_q=(None,) * len(guesses))
        told += row.choose(rows, drafts, in_blocks=in_blocks).logprobs
        steps += 1
    return row.generated, told, steps


CASES = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bad words": {"bad_words": [[0, 4], [8, 0], [4, 4], [8, 8], [0, 0]]},
    "bias": {"logit_bias": {0: -3.0, 7: 2.5}},
    "allowed": {"allowed_token_ids": [2, 3, 4, 8, 9]},
    "minimum length": {"min_tokens": 25, "logit_bias": {EOS: 5.0}},
    "stop token": {"stop_token_ids": [7], "min_tokens": 6},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bad_words": [[0, 8]], "logprobs": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_same_with_any_number_of_right_guesses(name):
    logits = model()
    truth, told = plainly(running(**CASES[name]), logits)
    assert len(truth) > 5
    if name not in ("nothing", "minimum length", "stop token"):
        assert truth != plainly(running(), logits)[0]  # the parameter does something
    for num_drafts in (1, 4, 7):
        for right in (lambda _: 0, lambda _, n=num_drafts: n, lambda step, n=num_drafts: step % (n + 1)):
            found, also_told, _ = with_guesses(running(**CASES[name]), logits, truth, num_drafts, right)
            assert found == truth, name
            assert also_told == told
    _, _, steps = with_guesses(running(**CASES[name]), logits, truth, 4, lambda _: 4)
    assert steps == -(-len(truth) // 5)  # all of them stand


@pytest.mark.parametrize(
    ("params", "guesses", "expected"),
    [
        # A guess that the bare row makes likeliest, but the guess before it has spoilt.
        ({"bad_words": [[2, 3]]}, (2, 3), (2, 5)),
        ({"frequency_penalty": 2.0}, (2, 2), (2, 5)),
        ({"presence_penalty": 2.0}, (3, 2, 3), (3, 2, 5)),
        ({"min_tokens": 2}, (2, EOS), (2, 5)),
        ({"min_tokens": 1}, (2, EOS), (2, EOS)),
    ],
)
def test_guess_is_judged_with_those_before_it(params, guesses, expected):
    row = running(**params)
    logits = torch.zeros(len(guesses) + 1, V)
    for index, token in enumerate(guesses):
        logits[index, token], logits[index, 5] = 3.0, 2.0
    found = row.choose(logits, Drafts(tokens=guesses, log_q=(None,) * len(guesses)))
    assert found.tokens == expected
    assert row.generated == list(expected)


@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
def test_sampled_guess_that_completes_a_bad_word_is_never_taken(in_blocks):
    """At a temperature the rows of a block see the guesses before them as well."""
    for seed in range(40):
        row = running(temperature=1.0, seed=seed, bad_words=[[2, 3]], ignore_eos=True)
        logits = torch.zeros(3, V)
        logits[0, 2], logits[1, 3] = 50.0, 50.0
        found = row.choose(logits, Drafts(tokens=(2, 3), log_q=(None, None)), in_blocks=in_blocks)
        assert found.num_accepted == 1
        assert found.tokens[0] == 2
        assert found.tokens[1] != 3


def test_text_that_ends_among_the_guesses_stops_there():
    for in_blocks, temperature in ((False, 0.0), (False, 1.0), (True, 1.0)):
        row = running(temperature=temperature, seed=1, stop_token_ids=[7])
        logits = torch.zeros(4, V)
        for index, token in enumerate((2, 7, 2)):
            logits[index, token] = 60.0
        found = row.choose(logits, Drafts(tokens=(2, 7, 2), log_q=(None,) * 3), in_blocks=in_blocks)
        assert found.tokens == (2, 7)
        assert found.num_accepted == 2
        assert row.is_over


# --- grammars


@pytest.fixture(scope="module")
def compile_grammar(tokenizer):
    return GrammarCompiler(tokenizer).compile


GRAMMARS = {
    "regex": Grammar("regex", "[ab]{3,6}-[0-9]{4}"),
    "choice": Grammar("choice", '["yes, of course", "yes", "no"]'),
    "schema": Grammar.for_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
def test_grammar_moves_on_with_the_guesses_that_stand(tokenizer, compile_grammar, name, in_blocks):
    """And only with those: wrong ones are tried on the way, which the grammar forbids most of the time."""
    compiled, size = compile_grammar(GRAMMARS[name]), tokenizer.vocab_size
    logits = model(size, seed=4)
    truth, _ = plainly(running(size, GRAMMARS[name], compiled), logits)
    for num_drafts in (1, 5):
        for right in (lambda _: 0, lambda _, n=num_drafts: n, lambda step, n=num_drafts: step % (n + 1)):
            row = running(size, GRAMMARS[name], compiled)
            found, _, _ = with_guesses(row, logits, truth, num_drafts, right, in_blocks=in_blocks)
            assert found == truth


@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
def test_sampled_text_with_guesses_follows_its_grammar(tokenizer, compile_grammar, in_blocks):
    """Guesses that the grammar allows and some that it does not; what comes out always fits."""
    name = "regex"
    compiled, size = compile_grammar(GRAMMARS[name]), tokenizer.vocab_size
    logits, rng, accepted = model(size, seed=4), np.random.default_rng(1), 0
    truth, _ = plainly(running(size, GRAMMARS[name], compiled), logits)
    for seed in range(6):
        row = running(size, GRAMMARS[name], compiled, temperature=0.7, seed=seed)
        while not row.generated or not row.is_over:
            guesses = [truth[min(len(row.generated) + i, len(truth) - 1)] for i in range(4)]
            guesses[int(rng.integers(4))] = int(rng.integers(size))
            rows = torch.stack([logits([*row.generated, *guesses[:i]]) for i in range(5)])
            drafts = Drafts(tokens=tuple(guesses), log_q=(None,) * 4)
            accepted += row.choose(rows, drafts, in_blocks=in_blocks).num_accepted
        text = b"".join(tokenizer.bytes_of(token) for token in row.generated[:-1]).decode()
        assert re.fullmatch("[ab]{3,6}-[0-9]{4}", text), text
    assert accepted > 0
