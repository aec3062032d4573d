"""Random numbers and drafting: a request's text is its own, whoever else guesses, how much, or not at all.

What is drawn is recorded number by number. Few tokens may be chosen, so that guesses of random stages are often right.
"""

from collections import Counter

import pytest
import torch
from engine_helpers import Service, request_of
from network_helpers import make_prompt

from deepspan.runtime import choosing, drafting, sampler
from deepspan.runtime.choosing import Drafts
from deepspan.runtime.sampler import Purpose
from deepspan.sched.draft_depth import DraftDepth

NEW, DEPTH = 12, 3
KEPT = slice(20, 26)  # tokens that may be chosen
MODES = [("standard", "greedy"), ("standard", "sampled"), ("block", "greedy"), ("block", "sampled")]


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16), draft_stages=2, n_routed_experts=4, vision_n_layers=1)


@pytest.fixture(scope="module")
def prompts(model):
    return [make_prompt([length], model.config.vocab_size, length) for length in (9, 14, 22, 31)]


@pytest.fixture
def drawn(monkeypatch):
    """Numbers drawn so far: (stream, index, purpose, step)."""
    calls, real = [], sampler.uniform

    def spy(seed, index, purpose=Purpose.TOKEN, step=0):
        calls.append((seed, index, purpose, step))
        return real(seed, index, purpose, step)

    for module in (choosing, drafting, sampler):
        monkeypatch.setattr(module, "uniform", spy)
    return calls


def service_of(model, rule="standard", sampling="greedy", *, is_drafting=True, depth=None, **options):
    if is_drafting:
        options |= {"draft_method": "dspark", "num_drafts": DEPTH, "draft_rule": rule, "draft_sampling": sampling}
    service = Service(model, depth=depth, **options)
    service.runner._forbidden = torch.ones(model.config.vocab_size, dtype=torch.bool)
    service.runner._forbidden[KEPT] = False
    return service


def limit(service, most):
    """Cut what is guessed. most: by prompt bytes and number of generated tokens, how many guesses a block keeps."""
    propose = service.runner._drafting.propose

    def cut(anchors):
        return [
            drafts.first(most(one.row.request.token_ids.tobytes(), len(one.row.generated)))
            for one, drafts in zip(anchors, propose(anchors), strict=True)
        ]

    service.runner._drafting.propose = cut


def add(service, prompt, seed, **params):
    options = {"temperature": 1.0, "seed": seed, "max_tokens": NEW} | params
    return service.core.add(request_of(prompt, **options))[0]


def texts(service, ids, disturb=None):
    return [output.token_ids for output in service.finish(ids, disturb)]


def alone(model, prompt, seed, *mode, **options):
    service = service_of(model, *mode, **options)
    return texts(service, [add(service, prompt, seed)])[0]


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_text_of_a_seed_does_not_depend_on_batch_mates(model, prompts, mode):
    expected = [alone(model, prompt, seed, *mode) for seed, prompt in enumerate(prompts)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        service = service_of(model, *mode)
        ids = {number: add(service, prompts[number], number) for number in order}
        mates = [add(service, prompts[0], 9), add(service, prompts[2], None, temperature=0.0)]
        found = texts(service, [*ids.values(), *mates])
        assert dict(zip(ids, found, strict=False)) == {number: expected[number] for number in order}
        stats = service.core.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_request_without_guesses_draws_one_number_a_token_as_if_nobody_guessed(model, prompts, drawn, mode):
    """The zero-draft contract (9.1): neither the numbers of acceptance nor those of a guess are touched."""
    expected = alone(model, prompts[1], 5, is_drafting=False)
    plain = list(drawn)
    assert plain == [(5, index, Purpose.TOKEN, 0) for index in range(NEW)]
    drawn.clear()
    service = service_of(model, *mode)
    service.scheduler.add, first_add = (
        lambda request_id, request, **options: first_add(
            request_id, request, **{**options, "is_drafted": request.params.seed != 5}
        ),
        service.scheduler.add,
    )
    ids = [add(service, prompts[0], 4), add(service, prompts[1], 5), add(service, prompts[2], 6)]
    assert texts(service, ids)[1] == expected
    assert [call for call in drawn if call[0] == 5] == plain
    assert any(purpose is Purpose.ACCEPT for seed, _, purpose, _ in drawn if seed == 4)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_every_number_decides_one_thing(model, prompts, drawn, mode):
    """No number is used twice, so that guesses, judgement and what is drawn afterwards are independent."""
    service = service_of(model, *mode)
    ids = [add(service, prompt, seed) for seed, prompt in enumerate(prompts)]
    found = texts(service, ids)
    assert max(Counter(drawn).values()) == 1
    for seed, tokens in enumerate(found):
        mine = [call for call in drawn if call[0] == seed]
        assert Counter(purpose for _, _, purpose, _ in mine)[Purpose.TOKEN] <= len(tokens)
        assert {purpose for _, _, purpose, _ in mine} == (set(Purpose) if mode[1] == "sampled" else {0, 1})


def test_greedy_requests_draw_nothing(model, prompts, drawn):
    service = service_of(model, "block", "sampled")
    ids = [add(service, prompt, None, temperature=0.0) for prompt in prompts]
    texts(service, ids)
    assert drawn == []


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_steps_without_guesses_draw_as_the_ordinary_sampler(model, prompts, drawn, mode):
    """A request that guesses at some steps only; others in the batch have guesses when it has none."""
    service = service_of(model, *mode)
    mine = prompts[1].ids.tobytes()
    limit(service, lambda prompt, generated: DEPTH if prompt != mine or generated % 2 else 0)
    choose, kinds = choosing.RunningRow.choose, []

    def spy(row, logits, drafts, **options):
        before = len(drawn)
        chosen = choose(row, logits, drafts, **options)
        if row.stream == 5:
            kinds.append((len(drafts.tokens), [purpose for _, _, purpose, _ in drawn[before:]]))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing.RunningRow, "choose", spy)
        texts(service, [add(service, prompts[0], 4), add(service, prompts[1], 5)])
    assert {count for count, _ in kinds} > {0}
    for count, purposes in kinds:
        if not count:
            assert purposes == [Purpose.TOKEN]
        else:
            assert Counter(purposes)[Purpose.ACCEPT] <= count
            assert Counter(purposes)[Purpose.TOKEN] <= 1


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_text_does_not_depend_on_how_much_mates_guess(model, prompts, mode):
    mine, found = prompts[1].ids.tobytes(), []
    for others in (0, 1, DEPTH):
        service = service_of(model, *mode)
        limit(service, lambda prompt, generated, others=others: 2 if prompt == mine else (others + generated) % 4)
        ids = [add(service, prompt, seed) for seed, prompt in enumerate(prompts)]
        found.append(texts(service, ids)[1])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_text_of_a_seed_survives_preemption(model, prompts, mode):
    expected = [alone(model, prompt, seed, *mode) for seed, prompt in enumerate(prompts)]
    service = service_of(model, *mode)
    ids = [add(service, prompt, seed) for seed, prompt in enumerate(prompts)]

    def disturb(step):
        if step in (1, 3, 4, 8):
            for request_id in ids[step % 2 :: 2]:
                if not service.core.is_finished(request_id):
                    service.preempt(request_id)

    assert texts(service, ids, disturb) == expected
    assert service.core.stats().num_preemptions > 2


def test_seeded_text_with_automatic_depth_is_that_of_not_drafting(model, prompts, drawn):
    """How deep the automatic mode goes depends on the clock; a seed promises the same text."""
    expected = alone(model, prompts[1], 5, is_drafting=False)
    drawn.clear()
    service = service_of(model, "block", "sampled", depth=DraftDepth(DEPTH, is_fixed=False))
    ids = [add(service, prompts[1], 5), add(service, prompts[0], None, temperature=0.0), add(service, prompts[2], None)]
    assert texts(service, ids)[0] == expected
    assert {call for call in drawn if call[0] == 5} == {(5, index, Purpose.TOKEN, 0) for index in range(NEW)}
    assert service.core.stats().num_draft_tokens > 0


# --- a drafter that fails one request


@pytest.mark.parametrize("fault", ["raises", "nan", "inf"])
def test_drafter_that_fails_for_one_request_changes_no_other_text(model, prompts, fault, monkeypatch):
    """Contract 9.3. That request goes on without guesses, the others with theirs."""
    mode = ("standard", "sampled")
    expected = [alone(model, prompt, seed, *mode) for seed, prompt in enumerate(prompts)]
    without = alone(model, prompts[1], 1, is_drafting=False)
    service = service_of(model, *mode)
    stages, propose = service.runner._drafting._drafter, service.runner._drafting.propose
    forward, victims = stages.forward, []

    def watching(anchors):
        victims[:] = [index for index, one in enumerate(anchors) if one.row.stream == 1]
        if victims and fault == "raises":
            raise RuntimeError("no room")
        return propose(anchors)

    def spoilt(batch, target):
        base, hidden = forward(batch, target)
        for index in victims:
            base[batch.parts[index].first, 23] = {"nan": torch.nan, "inf": torch.inf}[fault]
        return base, hidden

    monkeypatch.setattr(service.runner._drafting, "propose", watching)
    monkeypatch.setattr(stages, "forward", spoilt)
    ids = [add(service, prompt, seed) for seed, prompt in enumerate(prompts)]
    assert texts(service, ids) == [expected[0], without, *expected[2:]]


def test_lost_guesses_are_not_judged_later(model, prompts):
    """A drafter that stops in the middle: what it guessed before belongs to no later step."""
    service = service_of(model)
    propose, calls = service.runner._drafting.propose, []

    def stops(anchors):
        calls.append(len(anchors))
        if len(calls) % 3 == 0:
            return [Drafts() for _ in anchors]
        return propose(anchors)

    service.runner._drafting.propose = stops
    plain = service_of(model, is_drafting=False)
    expected = texts(plain, [add(plain, prompts[0], None, temperature=0.0)])
    assert texts(service, [add(service, prompts[0], None, temperature=0.0)]) == expected
