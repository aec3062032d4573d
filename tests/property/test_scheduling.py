"""Random requests, budgets, aborts and shortages: every request gets the answer it gets alone, nothing is leaked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import (
    MAX_SPAN,
    FakeExecutor,
    answer,
    image,
    request,
    small_cache,
    small_engine,
    small_families,
)

from deepspan.sched.scheduler import Scheduler

NUM_STEPS = 10_000


class Service:
    """A scheduler with a fake executor, driven a step at a time; ends requests as an engine would."""

    def __init__(self, num_blocks=40, prefix_caching=True, num_drafts=0, **engine):
        self.cache = small_cache(num_blocks, prefix_caching, num_drafts)
        if num_drafts:
            engine |= {"num_drafts": num_drafts, "draft_method": "dspark"}
        self.scheduler = Scheduler(small_engine(**engine), self.cache)
        self.requests, self.generated = {}, {}
        self.executor = FakeExecutor(small_families(num_drafts))
        self.budget = small_engine(**engine).max_batched_tokens

    def add(self, wanted, **options):
        request_id = len(self.requests)
        self.scheduler.add(request_id, wanted, **options)
        self.requests[request_id], self.generated[request_id] = wanted, []
        return request_id

    def step(self, wanted_drafts=0):
        plan = self.scheduler.plan(wanted_drafts)
        if plan is None:
            return False
        assert 0 < plan.num_tokens <= self.budget
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        result = self.executor.run(plan)
        finished = []
        for request_id, tokens in result.tokens.items():
            self.generated[request_id] += tokens
            if len(self.generated[request_id]) == self.requests[request_id].params.max_tokens:
                finished.append(request_id)
        self.scheduler.commit(plan, result, finished)
        self.scheduler.check()
        return True

    def finish(self):
        steps = 0
        while self.step():
            steps += 1
            assert steps < 2000, "no progress"

    def check_answers(self, aborted=()):
        for request_id, wanted in self.requests.items():
            expected = answer(wanted)
            got = self.generated[request_id]
            assert got == (expected[: len(got)] if request_id in aborted else expected), request_id


def random_request(rng):
    """One of few texts, so that prefixes are shared, with up to three images of few identities."""
    parts, room = [], 150
    for _ in range(int(rng.integers(1, 5))):
        if rng.random() < 0.4 and room > MAX_SPAN + 3:
            rows = int(rng.integers(1, MAX_SPAN - 5))
            parts.append(image(f"{rng.choice(['cat', 'dog'])}{rows}", rows))
            room -= rows + 6
        else:
            length = int(rng.integers(1, 60))
            parts.append([int(rng.integers(3)) + 1] * min(length, max(room, 1)))
            room -= length
    return request(*parts, max_tokens=int(rng.integers(1, 30)), salt=bytes([int(rng.random() < 0.1)]))


@pytest.mark.parametrize("seed", range(4))
def test_random_service_gives_every_request_its_own_answer(seed):
    rng = np.random.default_rng(seed)
    steps = 0
    while steps < NUM_STEPS // 4:
        num_drafts = int(rng.choice([0, 1, 5]))
        service = Service(
            num_blocks=int(rng.integers(18, 60)),
            num_drafts=num_drafts,
            prefix_caching=bool(rng.random() < 0.8),
            chunk_tokens=int(rng.choice([0, 1, 3, 17])),
            max_batched_tokens=int(rng.integers(31, 80)) + 4 * num_drafts,
        )
        aborted = set()
        for _ in range(300):
            if rng.random() < 0.3 and service.scheduler.num_waiting < 6:
                leader = len(service.requests) - 1
                after = leader if leader >= 0 and rng.random() < 0.2 else None
                service.add(random_request(rng), priority=int(rng.integers(2)), after=after)
            if rng.random() < 0.03 and service.requests:
                victim = int(rng.integers(len(service.requests)))
                if service.scheduler.abort(victim):
                    aborted.add(victim)
                    service.scheduler.check()
            steps += service.step(int(rng.integers(num_drafts + 1)))
        service.finish()
        service.check_answers(aborted)
        assert service.scheduler.num_running == service.scheduler.num_waiting == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, MAX_SPAN - 5)), min_size=1, max_size=4),
    budget=st.integers(31, 60),
    chunk=st.sampled_from([0, 1, 5, 16]),
)
def test_any_prompt_is_computed_in_whole_images_within_the_budget(lengths, budget, chunk):
    parts = []
    for index, (text, rows) in enumerate(lengths):
        parts += [[5] * text] if text else []
        parts += [image(f"{index}", rows)] if rows else []
    service = Service(max_batched_tokens=budget, chunk_tokens=chunk)
    service.add(request(*(parts or [[7]])))
    service.finish()  # the executor refuses a cut image, the service a step over its budget
    service.check_answers()
