"""What caches hold after guesses were judged: what the accepted tokens leave, one at a time and without guesses.

Everything that a next token may read is compared, in every family: window rows, entries, index keys, pending rows of
the compressors of both ratios, and the context rows of the draft stages. Every number of accepted guesses meets every
phase of a group and of a block (contracts 9.5, 9.6).
"""

from itertools import pairwise

import pytest
import torch
from drafting_helpers import Scripted, cache_rows
from engine_helpers import Service, request_of
from network_helpers import make_prompt

from deepspan.sched.draft_depth import DraftDepth

BOUND = 1e-4  # of rows that are normed, and of gates of that size


class Covering:
    """Lets numbers of guesses stand that have not met the phase yet. wanted: (phase, number) still to see."""

    def __init__(self, period, phases, num_drafts):
        self.period, self.num_drafts = period, num_drafts
        self.wanted = {(phase, right) for phase in phases for right in range(num_drafts + 1)}
        self._asked = set()

    def __call__(self, anchor):
        left = self.wanted - self._asked
        own = [right for right in range(anchor.count + 1) if (anchor.position % self.period, right) in left]
        if anchor.count < self.num_drafts or not own:
            # On to where most is left to see, or to the end.
            return max(range(anchor.count, -1, -1), key=lambda right: self._worth(anchor.position + right + 1, left))
        self._asked.add((anchor.position % self.period, own[0]))
        return own[0]

    def _worth(self, position, left):
        return sum(phase == position % self.period for phase, _ in left)


def replay(model, prompts, new, **options):
    """(tokens of each prompt, rows by prompt and number of computed tokens), nothing guessed."""
    service = Service(model, depth=DraftDepth(0, is_fixed=True), **options)
    ids = [i for n, prompt in enumerate(prompts) for i in service.core.add(request_of(prompt, f"{n}", max_tokens=new))]
    rows = {}

    def keep(_step):
        for number, request_id in enumerate(ids):
            if not service.core.is_finished(request_id) and service.scheduler.sequence(request_id).row is not None:
                count = service.scheduler.sequence(request_id).num_computed
                rows[number, count] = cache_rows(service, request_id)

    outputs = service.finish(ids, keep)
    return [output.token_ids for output in outputs], rows


def run(model, prompts, new, script, **options):
    """Serve the prompts with scripted guesses until all wanted numbers were seen; compare after every step."""
    tokens, expected = replay(model, prompts, new, **options)
    service = Service(model, **options)
    truth = {prompt.ids.tobytes(): found for prompt, found in zip(prompts, tokens, strict=True)}
    assert len(truth) == len(prompts), "prompts must be told apart"
    scripted = Scripted(service, truth, script)
    ids = [i for n, prompt in enumerate(prompts) for i in service.core.add(request_of(prompt, f"{n}", max_tokens=new))]
    num_compared, before = 0, {}

    def compare(_step):
        nonlocal num_compared
        for number, request_id in enumerate(ids):
            if service.core.is_finished(request_id) or service.scheduler.sequence(request_id).row is None:
                continue
            count, found = service.scheduler.sequence(request_id).num_computed, cache_rows(service, request_id)
            for name, rows in expected[number, count].items():
                assert found[name].shape == rows.shape
                assert not len(rows) or (found[name] - rows).abs().max() < BOUND, (name, number, count)
            num_compared += 1
            blocks = {block[0]: block[1:] for block in scripted.depths.get(prompts[number].ids.tobytes(), [])}
            position, before[number] = before.get(number), count
            if position in blocks and count != position:
                right, guesses = blocks[position]
                assert count == position + right + 1, "as many guesses stand as were meant to"
                if guesses == script.num_drafts:
                    script.wanted.discard((position % script.period, right))

    outputs = service.finish(ids, compare)
    assert [output.token_ids for output in outputs] == tokens
    assert script.wanted == set()
    return num_compared


def test_every_number_of_accepted_guesses_at_every_phase_of_a_block(tiny_models):
    """Ratios 4 and 16, blocks of 16: all phases of both, and of the window, at once."""
    model = tiny_models(ratios=(0, 4, 16), draft_stages=2, n_routed_experts=4, vision_n_layers=1)
    parts = [[33 + 3 * number] for number in range(7)] + [[5, (6, 6), 9]]
    prompts = [make_prompt(one, model.config.vocab_size, seed) for seed, one in enumerate(parts)]
    options = {"draft_method": "dspark", "num_drafts": 5, "num_blocks": 120}
    assert run(model, prompts, 64, Covering(16, range(16), 5), **options) > 100


def test_every_number_of_accepted_guesses_near_multiples_of_128(tiny_models):
    """Released window, ratios and blocks."""
    model = tiny_models(
        ratios=(0, 4, 128), draft_stages=1, n_routed_experts=4, vision=False, sliding_window=128, index_topk=32
    )
    lengths = [*range(118, 130), 126, 127, *range(246, 258)]
    prompts = [make_prompt([length], model.config.vocab_size, seed) for seed, length in enumerate(lengths)]
    limits = {"block_tokens": 128, "max_num_seqs": 26, "max_batched_tokens": 1600, "prefix_caching": False}
    options = {"draft_method": "dspark", "num_drafts": 4, "num_blocks": 110, **limits}
    phases = [124, 125, 126, 127, 0, 1, 2, 3, 4]
    assert run(model, prompts, 18, Covering(128, phases, 4), **options) > 60


def test_rows_of_draft_slots_are_replaced_by_context(tiny_models):
    """Where nothing is guessed for some steps, the context goes on being kept: later guesses see all of it."""
    model = tiny_models(ratios=(0, 4, 16), draft_stages=2, n_routed_experts=4, vision_n_layers=1)

    class Pausing:
        num_drafts, is_fixed = 3, True
        step = 0

        def choose(self, _):
            self.step += 1
            return 3 if self.step % 6 < 2 else 0

        def observe(self, *_):
            pass

    prompt = make_prompt([30], model.config.vocab_size, seed=3)
    options = {"draft_method": "dspark", "num_drafts": 3}
    tokens, expected = replay(model, [prompt], 40, **options)
    service = Service(model, depth=Pausing(), **options)
    Scripted(service, {prompt.ids.tobytes(): tokens[0]}, lambda anchor: anchor.position % 3)
    ids = service.core.add(request_of(prompt, "0", max_tokens=40))
    seen = []

    def compare(step):
        if step and not service.core.is_finished(ids[0]):
            count = service.scheduler.sequence(ids[0]).num_computed
            for name, rows in cache_rows(service, ids[0]).items():
                assert torch.allclose(rows, expected[0, count][name], atol=BOUND), (name, count)
            seen.append(count)

    assert service.finish(ids, compare)[0].token_ids == tokens[0]
    steps = [later - earlier for earlier, later in pairwise(seen)]
    assert 1 in steps
    assert max(steps) > 1


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_state_keeps_what_a_group_needs_and_what_may_be_taken_back(tiny_models, num_drafts):
    """The geometry behind the above: rows of a step and those it reads never share a place of a state block."""
    from deepspan.kv.families import cache_families

    model = tiny_models(ratios=(0, 4, 16), draft_stages=2, n_routed_experts=4, vision_n_layers=1)
    for family in cache_families(model.config, 64, 4, num_drafts, 2):
        if family.kind != "state":
            continue
        for count in range(1, 200):
            for accepted in range(num_drafts + 1):
                needed = range(family.first_needed(count + 1 + accepted), count)
                written = range(count, count + 1 + num_drafts)
                places = [(p // 64, p % 64 % family.block_rows) for p in (*needed, *written)]
                assert len(set(places)) == len(places), (family.name, count)
