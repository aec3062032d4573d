"""The sampler: cuts against direct computation, streams of random numbers, and the law of what is drawn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspan.core.sampling import SamplingParams
from deepspan.runtime.sampler import adjusted_logits, choose_token, token_distribution, token_logprobs, uniform

PROBS = (0.05, 0.4, 0.15, 0.1, 0.3)
LOGITS = torch.tensor(PROBS).log()


def _law(logits=LOGITS, **cuts):
    """Token id -> probability."""
    probs, ids = token_distribution(logits, SamplingParams(**{"temperature": 1.0} | cuts))
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


def _share(**weights):
    """Expected law from unnormalised weights, by token id as `t1=0.4`."""
    total = sum(weights.values())
    return pytest.approx({int(name[1:]): weight / total for name, weight in weights.items()}, abs=1e-7)


# --- greedy


def test_greedy_choice_is_the_largest():
    assert choose_token(LOGITS, SamplingParams(), seed=0, num_generated=0) == 1


@pytest.mark.parametrize("ties", [(2, 5), (0, 7), (6, 7), (1, 3, 5)])
def test_greedy_choice_between_equals_is_the_lowest_id(ties):
    logits = torch.zeros(8)
    logits[list(ties)] = 3.0
    assert choose_token(logits, SamplingParams(), seed=9, num_generated=4) == min(ties)


def test_greedy_choice_does_not_depend_on_the_stream():
    assert {choose_token(LOGITS, SamplingParams(), seed, index) for seed in range(4) for index in range(4)} == {1}


def test_greedy_choice_is_never_forbidden():
    logits = LOGITS.clone()
    logits[1] = -torch.inf
    assert choose_token(logits, SamplingParams(), seed=0, num_generated=0) == 4


# --- cuts


def test_distribution_without_cuts_is_the_softmax_most_likely_first():
    assert _law() == _share(t1=0.4, t4=0.3, t2=0.15, t3=0.1, t0=0.05)
    assert list(_law()) == [1, 4, 2, 3, 0]


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0, 10.0])
def test_distribution_at_a_temperature_is_the_softmax_of_scaled_logits(temperature):
    weights = {f"t{token}": prob ** (1 / temperature) for token, prob in enumerate(PROBS)}
    assert _law(temperature=temperature) == _share(**weights)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_distribution_at_a_vanishing_temperature_is_the_largest_alone(temperature):
    for logits in (LOGITS, LOGITS + 50):
        assert _law(logits, temperature=temperature)[1] == 1.0
        assert choose_token(logits, SamplingParams(temperature=temperature), seed=0, num_generated=0) == 1


def test_distribution_at_a_huge_temperature_is_uniform():
    assert _law(temperature=1e300) == pytest.approx(dict.fromkeys(range(5), 0.2))
    assert _law(temperature=1e300, top_k=1) == {1: 1.0}


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, "1"), (2, "14"), (3, "142"), (5, "14230"), (6, "14230"), (0, "14230"), (10**9, "14230")]
)
def test_distribution_with_top_k_keeps_the_likeliest(top_k, kept):
    assert _law(top_k=top_k) == _share(**{f"t{token}": PROBS[int(token)] for token in kept})


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, "1"), (0.39, "1"), (0.41, "14"), (0.69, "14"), (0.71, "142"), (0.96, "14230"), (1.0, "14230")],
)
def test_distribution_with_top_p_keeps_the_smallest_head_that_reaches_it(top_p, kept):
    assert _law(top_p=top_p) == _share(**{f"t{token}": PROBS[int(token)] for token in kept})


def test_distribution_with_top_p_met_exactly_keeps_no_token_more():
    assert _law(torch.zeros(4), top_p=0.5) == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.1, "14230"), (0.2, "1423"), (0.3, "142"), (0.7, "14"), (0.8, "1"), (1.0, "1")]
)
def test_distribution_with_min_p_keeps_shares_of_the_likeliest(min_p, kept):
    assert _law(min_p=min_p) == _share(**{f"t{token}": PROBS[int(token)] for token in kept})


def test_distribution_cuts_in_order_temperature_min_p_top_k_top_p():
    # Temperature 0.5 squares the probabilities: 0.16, 0.09, 0.0225, 0.01, 0.0025.
    assert _law(temperature=0.5, min_p=0.1) == _share(t1=0.16, t4=0.09, t2=0.0225)
    # Top_p counts what min_p and top_k left: 0.4 of 0.7 reaches 0.5, 0.4 of 1 would not.
    assert _law(top_k=2, top_p=0.5) == {1: 1.0}
    assert _law(min_p=0.7, top_p=0.5) == {1: 1.0}
    assert _law(top_k=3, top_p=0.5) == _share(t1=0.4, t4=0.3)


def test_distribution_keeps_equals_in_order_of_their_ids():
    assert list(_law(torch.zeros(6), top_k=3)) == [0, 1, 2]


def test_distribution_leaves_out_forbidden_tokens():
    logits = torch.zeros(6)
    logits[[0, 3]] = -torch.inf
    for cuts in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 1e300}):
        assert _law(logits, **cuts).keys() <= {1, 2, 4, 5}


logits_lists = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(
    logits_lists,
    st.floats(0.05, 5),
    st.integers(0, 13),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**20),
)
def test_distribution_of_any_logits_sums_to_one_and_holds_the_draw(
    values, temperature, top_k, top_p, min_p, seed, index
):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor(values)
    probs, ids = token_distribution(logits, params)
    assert 1 <= len(ids) <= len(values)
    assert float(probs.sum()) == pytest.approx(1)
    assert logits[ids[0]] == logits.max()
    assert (probs.diff() <= 0).all()
    assert choose_token(logits, params, seed, index) in ids.tolist()


# --- streams


def test_stream_of_same_seed_and_index_is_the_same_number():
    assert uniform(12, 34) == uniform(12, 34)
    params = SamplingParams(temperature=1.0)
    assert choose_token(LOGITS, params, 12, 34) == choose_token(LOGITS, params, 12, 34)


def test_stream_of_known_seeds_gives_known_numbers():
    """The seed is a promise: the same seed gives the same text in the next version too."""
    streams = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 2**20)]
    numbers = [0.011546754286331562, 0.34218278474233466, 0.3035680343067586, 0.5990527125137227]
    assert [uniform(*stream) for stream in streams] == numbers


def test_streams_differ_by_seed_and_index():
    numbers = {uniform(seed, index) for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1) for index in range(200)}
    assert len(numbers) == 6 * 200
    assert all(0 <= number < 1 for number in numbers)


def test_streams_of_neighbouring_seeds_and_indices_are_uncorrelated():
    table = np.array([[uniform(seed, index) for index in range(300)] for seed in range(4)])
    assert abs(table.mean() - 0.5) < 0.04
    for first, second in ((table[0], table[1]), (table[2], table[3]), (table[0, :-1], table[0, 1:])):
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(300)


# --- law


def _chi_square(counts, probs):
    expected = np.asarray(probs) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("cuts", "bound"),
    [
        ({}, 18.5),  # the bounds are exceeded with probability 0.001 by 4, 3, 2 and 1 degrees of freedom
        ({"temperature": 2.0}, 18.5),
        ({"top_p": 0.9}, 16.3),
        ({"min_p": 0.3}, 13.8),
        ({"temperature": 0.5, "top_k": 2}, 10.8),
    ],
    ids=str,
)
@pytest.mark.parametrize("along", ["indices", "seeds"])
def test_draws_follow_the_distribution(cuts, bound, along):
    num_draws = 3000
    params = SamplingParams(**{"temperature": 1.0} | cuts)
    streams = [(7, i) if along == "indices" else (i, 7) for i in range(num_draws)]
    draws = [choose_token(LOGITS, params, seed, index) for seed, index in streams]
    law = _law(**cuts)
    assert set(draws) <= law.keys()
    assert _chi_square(np.array([draws.count(token) for token in law]), list(law.values())) < bound


def test_draws_are_never_forbidden():
    logits = torch.zeros(40)
    logits[::2] = -torch.inf
    params = SamplingParams(temperature=5.0)
    assert {choose_token(logits, params, 1, index) % 2 for index in range(500)} == {1}


# --- bias, penalties, bad words, minimum length


def _adjusted(prompt=(), generated=(), ends=(), logits=None, **params):
    start = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0]) if logits is None else logits
    kept = start.clone()
    found = adjusted_logits(start, SamplingParams(**params), prompt, list(generated), ends)
    assert torch.equal(start, kept), "the logits of others may share this memory"
    return found.tolist()


def test_logit_bias_is_added():
    assert _adjusted(logit_bias={1: -2.0, 3: 0.5}) == [1.0, 0.0, -1.0, 1.0, 3.0]


def test_repetition_penalty_weakens_tokens_of_prompt_and_output():
    assert _adjusted([2, 2], [4], repetition_penalty=2.0) == [1.0, 2.0, -2.0, 0.5, 1.5]


def test_repetition_penalty_ignores_ids_outside_the_vocabulary():
    """Image tokens may have ids beyond the embedding."""
    assert _adjusted([7], [], repetition_penalty=2.0) == [1.0, 2.0, -1.0, 0.5, 3.0]


def test_presence_and_frequency_penalties_count_the_output_only():
    found = _adjusted([4], [1, 1, 0], presence_penalty=0.5, frequency_penalty=0.25)
    assert found == [0.25, 1.0, -1.0, 0.5, 3.0]


@pytest.mark.parametrize(
    ("generated", "banned"),
    [([], {0}), ([3], {0, 2}), ([1, 3], {0, 2, 4}), ([3, 1], {0}), ([1, 3, 3], {0, 2})],
)
def test_bad_words_are_never_completed(generated, banned):
    found = _adjusted((), generated, bad_words=[[0], [3, 2], [1, 3, 4]])
    assert {i for i, value in enumerate(found) if value == -math.inf} == banned


@pytest.mark.parametrize(("generated", "can_end"), [([], False), ([0], False), ([0, 0], True)])
def test_ends_wait_for_the_minimum_length(generated, can_end):
    found = _adjusted((), generated, ends={1, 4}, min_tokens=2)
    assert (found[1] == found[4] == -math.inf) is not can_end


def test_nothing_but_allowed_ids_is_left():
    found = _adjusted(allowed_token_ids=[3, 1], logit_bias={1: 2.0})
    assert found == [-math.inf, 4.0, -math.inf, 0.5, -math.inf]


def test_token_logprobs_are_before_any_cut_and_ranked():
    found = token_logprobs(LOGITS, 2, 3)
    assert found.logprob == pytest.approx(math.log(0.15))
    assert found.rank == 3
    assert [token for token, _ in found.top] == [1, 4, 2]
    assert [math.exp(value) for _, value in found.top] == pytest.approx([0.4, 0.3, 0.15])


def test_random_numbers_of_two_streams_differ():
    assert uniform(5, 0) != uniform(5 + (1 << 64), 0)
