"""Judging guesses: the law of what comes out is the target's, to rounding, under both rules and any kind of guess.

`RunningRow.choose` is asked with chosen numbers in the place of random ones. Each decision turns on one number and is
monotone in it, so the share of numbers that lead to an outcome is found by bisection: probabilities, not estimates.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

from deepspan.core.media import TokenKind
from deepspan.core.request import Request
from deepspan.core.sampling import SamplingParams
from deepspan.runtime import choosing
from deepspan.runtime.choosing import Drafts, RunningRow
from deepspan.runtime.sampler import Purpose
from deepspan.runtime.verification import accepts, block_length, draw, residual

V, N = 3, 2  # vocabulary and guesses of the enumeration
NEVER = math.inf  # a number that no test passes
EXACT = 1e-9
RNG = np.random.default_rng(5)
CONTEXTS = [context for length in range(N + 1) for context in product(range(V), repeat=length)]
# Logits of few bits, so that a penalty is taken off them without rounding.
TARGET = {context: torch.from_numpy(RNG.normal(size=V) * 96).round().float() / 64 for context in CONTEXTS}
PROPOSAL = {context: torch.tensor(RNG.normal(size=V), dtype=torch.float64).log_softmax(0) for context in CONTEXTS}


def running(generated=(), vocabulary=V, forbidden=(), guide=None, **params):
    """A row that has generated something. Ids at the end of the vocabulary and beyond do not end the text."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "ignore_eos": True} | params
    wanted = Request(
        token_ids=np.zeros(4, dtype=np.int64),
        kinds=np.full(4, TokenKind.TEXT, dtype=np.int8),
        spans=(),
        images=(),
        params=SamplingParams(**options),
    )
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(forbidden)] = True
    return RunningRow(request=wanted, generated=list(generated), eos=vocabulary, forbidden=mask, guide=guide)


def drafts_of(tokens, *, drawn):
    log_q = [PROPOSAL[tuple(tokens[:i])] if drawn else None for i in range(len(tokens))]
    return Drafts(tokens=tuple(tokens), log_q=tuple(log_q))


def logs(*probs):
    return torch.tensor(probs, dtype=torch.float64).log()


# --- enumeration


class Numbers:
    """Stands in for `uniform`: ACCEPT numbers by place among the guesses, one TOKEN number."""

    def __init__(self):
        self.accept, self.token = {}, 0.5

    def __call__(self, _seed, index, purpose=Purpose.TOKEN, _step=0):
        return self.token if purpose is Purpose.TOKEN else self.accept[index]


@pytest.fixture
def numbers(monkeypatch):
    made = Numbers()
    monkeypatch.setattr(choosing, "uniform", made)
    monkeypatch.setattr("deepspan.runtime.sampler.uniform", made)
    return made


def share(passes):
    """Share of [0, 1) on which a test passes that passes up to some number."""
    if passes(1 - 2**-53):
        return 1.0
    low, high = 0.0, 1.0
    while high - low > EXACT / 100:
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def pieces(token_at):
    """Token -> share of [0, 1): every token has one piece."""
    found = {}

    def cut(low, high, at_low, at_high):
        if at_low == at_high or high - low < EXACT / 100:
            found[at_low] = found.get(at_low, 0.0) + high - low
            return
        middle = (low + high) / 2
        at_middle = token_at(middle)
        cut(low, middle, at_low, at_middle)
        cut(middle, high, at_middle, at_high)

    cut(0.0, 1.0, token_at(0.0), token_at(1 - 2**-53))
    return found


def outcomes(numbers, drafts, in_blocks, params):
    """{tokens that come out: probability} for given guesses."""
    logits = torch.stack([TARGET[drafts.tokens[:i]] for i in range(N + 1)])

    def chosen():
        return running(**params).choose(logits, drafts, in_blocks=in_blocks)

    def taken_with(place):
        """Numbers with which the guess at `place` is the one on trial: in blocks the longest that passes counts."""
        before = NEVER if in_blocks else 0.0
        numbers.accept = {i: before if i < place else NEVER for i in range(N)}

    passing = []
    for place in range(N):
        if not in_blocks and passing and passing[-1] == 0:
            passing.append(0.0)
            continue

        def passes(number, place=place):
            taken_with(place)
            numbers.accept[place] = number
            return chosen().num_accepted == place + 1

        passing.append(share(passes))
    law = {}
    for count in range(N + 1):
        if in_blocks:
            weight = (passing[count - 1] if count else 1.0) * math.prod(1 - h for h in passing[count:])
        else:
            weight = math.prod(passing[:count]) * (1 - passing[count] if count < N else 1.0)
        if weight < EXACT / 10:
            continue
        taken_with(count)
        if in_blocks and count:
            numbers.accept[count - 1] = 0.0

        def token_at(number, count=count):
            numbers.token = number
            found = chosen()
            assert found.num_accepted == count
            assert found.tokens[:-1] == drafts.tokens[:count]
            return found.tokens[-1]

        for token, piece in pieces(token_at).items():
            tokens = (*drafts.tokens[:count], token)
            law[tokens] = law.get(tokens, 0.0) + weight * piece
    return law


def target_law(context, params):
    """Said once more in numpy: frequency penalty, temperature, top_k, softmax."""
    logits = TARGET[context].double().numpy() - params.get("frequency_penalty", 0.0) * np.bincount(context, minlength=V)
    logits = logits / params.get("temperature", 1.0)
    if params.get("top_k"):
        logits[np.argsort(-logits)[params["top_k"] :]] = -np.inf
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def completed(law, params):
    """Joint law of N + 1 tokens: what a step left out is drawn from the target."""
    joint = np.zeros((V,) * (N + 1))
    for tokens, probability in law.items():
        for rest in product(range(V), repeat=N + 1 - len(tokens)):
            whole, weight = (*tokens, *rest), probability
            for place in range(len(tokens), N + 1):
                weight *= target_law(whole[:place], params)[whole[place]]
            joint[whole] += weight
    return joint


def expected_joint(params):
    joint = np.zeros((V,) * (N + 1))
    for tokens in product(range(V), repeat=N + 1):
        joint[tokens] = math.prod(target_law(tokens[:i], params)[token] for i, token in enumerate(tokens))
    return joint


LAWS = {"plain": {}, "top_k": {"top_k": 2, "temperature": 1.7}, "penalty": {"frequency_penalty": 0.75}}


@pytest.mark.parametrize("name", LAWS)
def test_joint_law_with_drawn_guesses_is_the_target_law(numbers, name):
    """Under both rules; the block rule takes as many guesses or more."""
    params, accepted = LAWS[name], {}
    for in_blocks in (False, True):
        total, accepted[in_blocks] = np.zeros((V,) * (N + 1)), 0.0
        for tokens in product(range(V), repeat=N):
            drawn = math.exp(sum(float(PROPOSAL[tokens[:i]][token]) for i, token in enumerate(tokens)))
            law = outcomes(numbers, drafts_of(tokens, drawn=True), in_blocks, params)
            assert sum(law.values()) == pytest.approx(1, abs=EXACT)
            total += drawn * completed(law, params)
            accepted[in_blocks] += drawn * sum(weight * (len(out) - 1) for out, weight in law.items())
        assert np.abs(total - expected_joint(params)).max() < EXACT, in_blocks
    assert 0.3 < accepted[False] < accepted[True] + EXACT < N
    assert name == "top_k" or accepted[True] > accepted[False] + 1e-3


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
def test_joint_law_with_likeliest_guesses_is_the_target_law(numbers, name, in_blocks):
    """The guess is a function of what is known: all of q lies on it."""
    params = LAWS[name]
    for tokens in ((0, 0), (0, 2), (1, 1), (2, 0)):
        law = outcomes(numbers, drafts_of(tokens, drawn=False), in_blocks, params)
        assert np.abs(completed(law, params) - expected_joint(params)).max() < EXACT


# --- the rules by themselves


def test_standard_rule_takes_a_guess_with_the_ratio_of_its_probabilities():
    log_p, log_q = logs(0.1, 0.6, 0.3), logs(0.4, 0.4, 0.2)
    for draft, ratio in enumerate((0.25, 1.0, 1.0)):
        assert share(lambda u, d=draft: accepts(log_p, log_q, d, u)) == pytest.approx(ratio, abs=EXACT)
    for draft, p in enumerate((0.1, 0.6, 0.3)):  # all of q on the guess
        assert share(lambda u, d=draft: accepts(log_p, None, d, u)) == pytest.approx(p, abs=EXACT)


def test_what_is_drawn_from_a_residual_is_the_positive_part():
    log_p, log_q = logs(0.1, 0.6, 0.3), logs(0.4, 0.4, 0.2)
    assert residual(log_p, log_q, 0).exp().tolist() == pytest.approx([0, 0.2, 0.1], abs=EXACT)
    assert residual(log_p, None, 1).exp().tolist() == pytest.approx([0.1, 0, 0.3], abs=EXACT)
    assert residual(log_p, log_q, 0, math.log(0.8)).exp().tolist() == pytest.approx([0, 0.08, 0.04], abs=EXACT)


@pytest.mark.parametrize("log_share", [0.0, math.log(0.5)])
def test_residual_that_rounding_leaves_empty_is_the_target(log_share):
    log_p = torch.tensor([0.0, -math.inf, -math.inf]).double()
    for log_q in (None, log_p):
        assert torch.equal(residual(log_p, log_q, 0, log_share), log_p)


def test_draw_never_points_at_or_behind_what_has_no_weight():
    weights = torch.tensor([-math.inf, 0.0, -math.inf, -0.3, -math.inf]).double()
    assert {draw(weights, u) for u in (0.0, 0.3, 0.7, 1 - 2**-53)} == {1, 3}


# --- guesses that cannot stand


@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("barred", ["forbidden", "top_k", "grammar-like"])
def test_guess_without_probability_is_never_taken(numbers, in_blocks, drawn, barred):
    """Placeholders of images, the noise token, and whatever cuts leave out; even with the smallest number there is."""
    params = {"forbidden": {}, "top_k": {"top_k": 1}, "grammar-like": {"allowed_token_ids": [0, 2]}}[barred]
    row = running(forbidden=[1] if barred == "forbidden" else [], **params)
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    numbers.accept = {0: 0.0, 1: 0.0}
    log_q = logs(1e-3, 1 - 2e-3, 1e-3) if drawn else None
    found = row.choose(logits, Drafts(tokens=(1, 1), log_q=(log_q, log_q)), in_blocks=in_blocks)
    assert found.num_accepted == 0
    assert found.tokens[0] != 1


def test_placeholder_is_no_guess():
    """Shorter blocks are shorter: -1 would be the last token of the vocabulary."""
    with pytest.raises(AssertionError):
        Drafts(tokens=(2, -1), log_q=(None, None))
    with pytest.raises(AssertionError):
        Drafts(tokens=(2, 1), log_q=(None,))


@pytest.mark.parametrize("in_blocks", [False, True], ids=["standard", "block"])
@pytest.mark.parametrize("place", [0, 1])
def test_guess_from_what_is_no_law_is_never_taken_and_the_choice_is_valid(numbers, in_blocks, place):
    """Contract 9.3: NaN in what a guess was drawn from must not leak an id."""
    log_q = [PROPOSAL[()], PROPOSAL[(0,)]]
    log_q[place] = torch.full((V,), torch.nan, dtype=torch.float64)
    logits = torch.stack([TARGET[()], TARGET[(0,)], TARGET[(0, 0)]])
    numbers.accept = {0: 0.0, 1: 0.0}
    found = running().choose(logits, Drafts(tokens=(0, 0), log_q=tuple(log_q)), in_blocks=in_blocks)
    assert found.num_accepted <= place
    assert all(0 <= token < V for token in found.tokens)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_that_are_no_numbers_choose_nothing(row):
    logits = torch.zeros(3, V)
    logits[row, 1] = torch.nan
    one = running()
    with pytest.raises(ArithmeticError, match="not numbers"):
        one.choose(logits, drafts_of((0, 0), drawn=False))
    assert one.generated == []


def test_block_that_nothing_is_left_for_passes_with_no_number():
    """Where p lies on the next guess alone, all of the lower share goes on to it."""
    log_p = [logs(0.5, 0.5), logs(1.0, 0.0)] * 2
    assert block_length(log_p[:3], [None, None], [0, 0], [0.0, NEVER])[0] == 0
    assert block_length(log_p[:3], [None, None], [0, 0], [NEVER, 0.499])[0] == 2
    assert block_length(log_p[:3], [None, None], [0, 0], [NEVER, 0.501])[0] == 0
