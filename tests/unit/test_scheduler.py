"""The scheduler alone: chunks, images, order, room; the vectors of the runtime contracts (groups 2 and 12)."""

import pytest
from scheduling import MAX_SPAN, image, request, small_cache, small_engine

from deepspan.core.media import ImageSpan
from deepspan.core.step import StepResult
from deepspan.errors import InputError
from deepspan.sched.scheduler import Scheduler
from deepspan.sched.sequence import Sequence


def _scheduler(num_blocks=40, **engine):
    return Scheduler(small_engine(**engine), small_cache(num_blocks))


def _step(scheduler, token=7, finished=()):
    """One step in which every chunk that samples gets `token`; returns {request: (start, end)}."""
    plan = scheduler.plan()
    if plan is None:
        return None
    scheduler.commit(plan, StepResult(tokens={c.request_id: [token] for c in plan.chunks if c.samples}), finished)
    scheduler.check()
    return {chunk.request_id: (chunk.start, chunk.end) for chunk in plan.chunks}


def _placed(length, *items):
    """A sequence with placeholders (offset, length), whatever is in them."""
    wanted = request([1])
    spans = tuple(ImageSpan(offset=o, first=o, last=o + n - 1) for o, n in items)
    object.__setattr__(wanted, "spans", spans)
    return Sequence(request_id=0, request=wanted, order=(0, 0), token_ids=[1] * length)


@pytest.mark.parametrize(
    ("length", "items", "budget", "ends"),
    [
        (300, [(100, 120)], 160, [100, 260, 300]),
        (120, [(10, 50), (70, 50)], 100, [70, 120]),
        (110, [(10, 50), (60, 50)], 100, [60, 110]),
        (200, [(0, 120)], 120, [120, 200]),
    ],
)
def test_chunk_never_cuts_a_placeholder(length, items, budget, ends):
    sequence, found = _placed(length, *items), [0]
    while found[-1] < length:
        found.append(sequence.chunk_end(found[-1], budget, budget))
    assert found[1:] == ends


def test_chunk_at_an_image_that_does_not_fit_is_empty():
    sequence = _placed(200, (0, 120))
    assert sequence.chunk_end(0, 119, 119) == 0
    assert sequence.chunk_end(0, 120, 16) == 120  # longer than a chunk, but within the budget


def test_small_chunks_take_an_image_whole():
    scheduler = _scheduler(chunk_tokens=3)
    scheduler.add(0, request([1] * 5, image("cat", 10), [2] * 4))
    chunks = []
    while not chunks or chunks[-1][1] < 24:
        chunks.append(_step(scheduler)[0])
    assert chunks == [(0, 3), (3, 5), (5, 20), (20, 23), (23, 24)]


def test_image_runs_while_others_decode():
    """Decodes are served first, yet what they leave is enough for the largest image."""
    scheduler = _scheduler(max_batched_tokens=31)
    for number in range(3):
        scheduler.add(number, request([number + 1] * 4, max_tokens=50))
    _step(scheduler)
    scheduler.add(3, request([9] * 4, image("cat", MAX_SPAN - 3)))
    assert _step(scheduler)[3] == (0, 4)  # up to the image
    step = _step(scheduler)
    assert step[3] == (4, 4 + 3 + MAX_SPAN)
    assert len(step) == 4


def test_requests_start_in_order_of_priority_and_arrival():
    scheduler = _scheduler(max_num_seqs=1)
    for number, priority in enumerate((1, 0, 0)):
        scheduler.add(number, request([1] * 4), priority=priority)
    order = []
    while (step := _step(scheduler, finished=range(3))) is not None:
        order += step
    assert order == [1, 2, 0]


def test_second_request_with_the_same_image_encodes_nothing():
    scheduler = _scheduler()
    scheduler.add(0, request([1], image("cat", 8)))
    scheduler.add(1, request([2, 2], image("cat", 8)))
    plan = scheduler.plan()
    assert [job.image.digest for job in plan.encoder_jobs] == ["cat"]
    assert len(plan.chunks) == 2


def test_more_images_than_the_encoder_keeps_are_served_one_after_the_other():
    scheduler = _scheduler(encoder_rows=MAX_SPAN)
    scheduler.add(0, request(*(image(name, 18) for name in "abc")))
    jobs = []
    for _ in range(3):
        plan = scheduler.plan()
        jobs.append([job.image.digest for job in plan.encoder_jobs])
        scheduler.commit(plan, StepResult(tokens={0: [7]} if plan.chunks[0].samples else {}))
    assert jobs == [["a"], ["b"], ["c"]]


def test_third_full_request_waits_where_two_fit():
    scheduler = _scheduler(num_blocks=11)
    for number in range(3):
        scheduler.add(number, request([number + 1] * 60, max_tokens=4))
    for _ in range(4):
        _step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.num_preemptions == 0
    scheduler.abort(0)
    assert 2 in _step(scheduler)


def test_last_request_is_preempted_when_blocks_run_out_and_goes_on_later():
    scheduler = _scheduler(num_blocks=5)
    scheduler.add(0, request([1] * 30, max_tokens=20))
    scheduler.add(1, request([2] * 30, max_tokens=20))
    _step(scheduler)
    while scheduler.num_running == 2:
        _step(scheduler)
    assert scheduler.num_preemptions == 1
    assert scheduler.sequence(0).row is not None
    scheduler.abort(0)
    tokens = len(scheduler.sequence(1).token_ids)
    assert _step(scheduler)[1][1] == tokens


def test_request_without_room_to_grow_beside_the_others_waits():
    scheduler = _scheduler(num_blocks=4)
    for number in range(2):
        scheduler.add(number, request([number + 1] * 30, max_tokens=20))
    _step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_sibling_waits_for_the_prompt_and_shares_it():
    scheduler = _scheduler()
    wanted = request([1] * 50)
    scheduler.add(0, wanted)
    scheduler.add(1, wanted, after=0)
    assert list(_step(scheduler)) == [0]
    while 1 not in (step := _step(scheduler)):
        pass
    assert step[1] == (48, 50)
    assert scheduler.sequence(1).num_cached == 48


def test_failed_request_ends_and_the_others_go_on():
    scheduler = _scheduler()
    for number in range(2):
        scheduler.add(number, request([number + 1] * 4))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult(tokens={1: [7]}, failed={0: "no"}))
    scheduler.check()
    assert not scheduler.abort(0)
    assert scheduler.sequence(1).token_ids[-1] == 7


def test_request_aborted_while_its_step_ran_is_left_out():
    scheduler = _scheduler()
    scheduler.add(0, request([1] * 4))
    plan = scheduler.plan()
    assert scheduler.abort(0)
    scheduler.commit(plan, StepResult(tokens={0: [7]}))
    scheduler.check()
    assert scheduler.plan() is None


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request([1] * 250, max_tokens=7), "250 prompt tokens and max_tokens 7 are more than max_model_len 256"),
        (request([1] * 200, max_tokens=7), "needs 13 blocks of the rows_4 cache, which has 12"),
        (request(image("cat", 60)), "an image of 66 tokens does not fit a step of 48"),
    ],
)
def test_request_that_cannot_run_even_alone_is_refused(wanted, message):
    scheduler = _scheduler(num_blocks=12)
    with pytest.raises(InputError, match=message):
        scheduler.add(0, wanted)
    scheduler.check()
    assert scheduler.num_waiting == 0
