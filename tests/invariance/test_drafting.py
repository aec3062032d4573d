"""Greedy drafting: whatever is guessed, and however much of it stands, the tokens are those of the whole sequence.

The guesses are scripted (`drafting_helpers.Scripted`), so that every number of them from none to all is taken; what a
random drafter guesses is almost always wrong.
"""

from dataclasses import replace

import numpy as np
import pytest
from drafting_helpers import Scripted, cycling, spoil_rows
from engine_helpers import Service, greedy, request_of
from network_helpers import make_prompt

NEW = 24
PARTS = {
    "text": [37],
    "one image": [18, (6, 12), 11],
    "text at a block's end": [48],
    "two images": [18, (6, 6), 6, (3, 4), 2],
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16), draft_stages=2, n_routed_experts=4, vision_n_layers=1)


@pytest.fixture(scope="module")
def prompts(model):
    return {name: make_prompt(parts, model.config.vocab_size, seed) for seed, (name, parts) in enumerate(PARTS.items())}


@pytest.fixture(scope="module")
def expected(model, prompts):
    return {name: tuple(greedy(model, prompt, NEW)[0]) for name, prompt in prompts.items()}


def drafting(model, prompts, expected, num_drafts, script=None, **options):
    """A service whose guesses stand in turn none, some and all."""
    service = Service(model, draft_method="dspark", num_drafts=num_drafts, **options)
    truth = {prompts[name].ids.tobytes(): expected[name] for name in prompts}
    return service, Scripted(service, truth, script or cycling(num_drafts))


def add(service, prompts, names, **params):
    return [i for name in names for i in service.core.add(request_of(prompts[name], name, max_tokens=NEW, **params))]


def check(outputs, names, expected):
    for name, output in zip(names, outputs, strict=True):
        assert output.token_ids == expected[name], name


def counts_taken(script):
    """How often each number of guesses stood, of those whose request went on."""
    return {right for blocks in script.depths.values() for _, right, _ in blocks}


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_batch_of_eight_with_any_number_of_drafts(model, prompts, expected, num_drafts):
    rule = ("standard", "block")[num_drafts % 2]
    service, script = drafting(model, prompts, expected, num_drafts, draft_rule=rule, num_blocks=90)
    names = [*prompts, *prompts]
    check(service.finish(add(service, prompts, names)), names, expected)
    assert counts_taken(script) == set(range(num_drafts + 1))
    stats = service.core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    # Every token comes with a step of its own or is an accepted guess; the first needs no guess (contract 9.11).
    blocks = sum(len(blocks) for blocks in script.depths.values())
    assert stats.num_generated_tokens == 8 * NEW
    assert stats.num_drafts <= blocks
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)


@pytest.mark.parametrize(("num_drafts", "rule"), [(1, "standard"), (4, "block"), (7, "standard")])
def test_alone_with_rows_taken_back_spoilt(model, prompts, expected, num_drafts, rule):
    """What guesses that were not taken left behind is never read."""
    for name in ("text", "one image"):
        service, script = drafting(model, prompts, expected, num_drafts, draft_rule=rule)
        ids = add(service, prompts, [name])

        def spoil(step, service=service, ids=ids):
            if step and not service.core.is_finished(ids[0]):
                spoil_rows(service, ids[0])

        check(service.finish(ids, spoil), [name], expected)
        assert len(counts_taken(script)) > 1


@pytest.mark.parametrize("num_drafts", [2, 8])
@pytest.mark.parametrize("name", ["text", "one image"])
def test_all_guesses_right_take_as_few_steps_as_there_can_be(model, prompts, expected, name, num_drafts):
    service, _ = drafting(model, prompts, expected, num_drafts, script=lambda anchor: anchor.count)
    check(service.finish(add(service, prompts, [name])), [name], expected)
    # The prompt's step gives one token, every later one as many as it verifies and one more.
    assert service.core.stats().num_steps == 1 + -(-(NEW - 1) // (1 + num_drafts))
    assert service.core.stats().num_accepted_tokens == service.core.stats().num_draft_tokens


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_guesses_of_the_stages_themselves(model, prompts, expected, num_drafts):
    """No script; random stages guess, in chunks of a few tokens."""
    service = Service(model, draft_method="dspark", num_drafts=num_drafts, num_blocks=90, chunk_tokens=7)
    names = [*prompts, *prompts]
    check(service.finish(add(service, prompts, names)), names, expected)
    assert service.core.stats().num_draft_tokens > 100


@pytest.mark.parametrize("num_drafts", [1, 6])
def test_after_prefix_hits(model, prompts, expected, num_drafts):
    service, _ = drafting(model, prompts, expected, num_drafts, num_blocks=90)
    names = list(prompts)
    cold = service.finish(add(service, prompts, names))
    warm = service.finish(add(service, prompts, names))
    check(cold, names, expected)
    check(warm, names, expected)
    assert all(output.num_cached_tokens for output in warm)


def test_hit_on_what_was_generated_with_drafts(model, prompts, expected):
    """Blocks that were filled by guesses, some taken and some not, are published and found by a longer prompt."""
    whole = make_prompt([70], model.config.vocab_size, seed=9)
    first = replace(whole, ids=whole.ids[:20], kinds=whole.kinds[:20])
    tokens = greedy(model, first, 40)[0]
    ids = [*first.ids.tolist(), *tokens]
    second = replace(whole, ids=np.asarray(ids), kinds=whole.kinds[: len(ids)])
    truth = {first.ids.tobytes(): tokens, second.ids.tobytes(): greedy(model, second, 12)[0]}
    service = Service(model, draft_method="dspark", num_drafts=5)
    Scripted(service, truth, cycling(5))
    for prompt, new in ((first, 40), (second, 12)):
        output = service.finish(service.core.add(request_of(prompt, max_tokens=new)))[0]
        assert list(output.token_ids) == truth[prompt.ids.tobytes()]
    assert output.num_cached_tokens == 48  # three blocks, of which the first prompt filled one


@pytest.mark.parametrize("num_drafts", [2, 5])
def test_with_so_few_blocks_that_requests_push_each_other_out(model, prompts, expected, num_drafts):
    service, _ = drafting(
        model, prompts, expected, num_drafts, num_blocks=13, max_model_len=100, max_num_seqs=8, chunk_tokens=17
    )
    names = [*prompts, *prompts]
    check(service.finish(add(service, prompts, names)), names, expected)
    assert service.core.stats().num_preemptions > 0


@pytest.mark.parametrize("num_drafts", [1, 6])
def test_preempted_again_and_again(model, prompts, expected, num_drafts):
    service, script = drafting(model, prompts, expected, num_drafts, num_blocks=90)
    names = list(prompts)
    ids = add(service, prompts, names)

    def disturb(step):
        if step % 2 and step < 12:
            for request_id in ids[step % 3 :: 2]:
                if not service.core.is_finished(request_id):
                    service.preempt(request_id)

    check(service.finish(ids, disturb), names, expected)
    assert service.core.stats().num_preemptions > 4
    assert counts_taken(script) == set(range(num_drafts + 1))


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_batch_mates_that_are_aborted_change_nothing(model, prompts, expected, num_drafts):
    service, _ = drafting(model, prompts, expected, num_drafts, num_blocks=90)
    names = [*prompts, *prompts]
    ids = add(service, prompts, names)
    gone = {ids[1]: 2, ids[4]: 4, ids[6]: 0}

    def disturb(step):
        for request_id, when in gone.items():
            if step == when:
                service.core.abort(request_id)

    outputs = service.finish(ids, disturb)
    for request_id, name, output in zip(ids, names, outputs, strict=True):
        if request_id in gone:
            assert output.finish_reason == "abort"
            assert output.token_ids == expected[name][: len(output.token_ids)]
        else:
            assert output.token_ids == expected[name]


def test_depth_that_changes_every_step(model, prompts, expected):
    class Restless:
        """Depths 0 to 6, never twice the same."""

        num_drafts, is_fixed = 6, True

        def __init__(self):
            self.step = 0

        def choose(self, num_decoding):
            self.step += 1
            return self.step * 5 % 7

        def observe(self, *_):
            pass

    service, script = drafting(model, prompts, expected, 6, depth=Restless(), num_blocks=90)
    names = [*prompts, *prompts]
    check(service.finish(add(service, prompts, names)), names, expected)
    assert {count for blocks in script.depths.values() for _, _, count in blocks} == set(range(1, 7))


@pytest.mark.parametrize("num_drafts", [3, 8])
def test_request_that_ends_at_the_longest_length_guesses_nothing_behind_it(model, prompts, expected, num_drafts):
    """Contract 9.11: no guess may stand where no token can."""
    prompt = prompts["text"]
    service, script = drafting(model, prompts, expected, num_drafts, max_model_len=len(prompt) + NEW)
    check(service.finish(add(service, prompts, ["text"])), ["text"], expected)
    for position, _, count in script.depths[prompt.ids.tobytes()]:
        # One token more is always chosen behind the guesses.
        assert position + count + 1 <= len(prompt) + NEW - 1


@pytest.mark.parametrize("place", [0, 1, 5, 6, 7])
def test_end_among_the_guesses_ends_the_text_there(model, prompts, expected, place):
    """A stop token that is accepted, that is the one behind the guesses, and that comes first of all."""
    stop = expected["text"][place]
    first = expected["text"].index(stop)
    service, _ = drafting(model, prompts, expected, 5, script=lambda anchor: anchor.count)
    output = service.finish(add(service, prompts, ["text"], stop_token_ids=[stop]))[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == expected["text"][: first + 1]
