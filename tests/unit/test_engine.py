"""The step loop without a model: events, ends, aborts, faults, and the thread behind asyncio; no torch."""

import asyncio
import threading
from dataclasses import replace

import pytest
from scheduling import FakeExecutor, answer, image, request, small_cache, small_engine, small_families

from deepspan.engine.background import BackgroundEngine
from deepspan.engine.core import EngineCore
from deepspan.errors import InputError, OverloadedError
from deepspan.sched.scheduler import Scheduler

PROMPTS = [request([5] * 30), request([6] * 3, image("cat", 8), [7]), request([5] * 30, [8], max_tokens=9)]


def make_core(tokenizer, failing=(), num_blocks=40, **engine):
    executor = FakeExecutor(small_families(), frozenset(failing))
    return EngineCore(Scheduler(small_engine(**engine), small_cache(num_blocks)), executor, tokenizer)


def run(core, ids):
    events = []
    while not all(core.is_finished(i) for i in ids):
        events += core.step()
        core.check()
    return events


# --- the core


def test_every_request_gets_its_tokens_and_one_terminal_event(tokenizer):
    core = make_core(tokenizer)
    ids = [i for prompt in PROMPTS for i in core.add(prompt)]
    events = run(core, ids)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        mine = [event for event in events if event.request == request_id]
        assert [event.token_id for event in mine] == answer(prompt)
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + ["length"]
        assert core.take(request_id).token_ids == tuple(answer(prompt))
    assert not core.has_work


def test_failed_request_ends_with_its_error_and_the_others_are_unchanged(tokenizer):
    core = make_core(tokenizer, failing=[1])
    ids = [i for prompt in PROMPTS for i in core.add(prompt)]
    events = run(core, ids)
    outputs = [core.take(i) for i in ids]
    assert (outputs[1].finish_reason, outputs[1].error) == ("error", "told to fail")
    assert [e.finish_reason for e in events if e.request == 1] == ["error"]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [tuple(answer(PROMPTS[i])) for i in (0, 2)]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborted_request_ends_at_once_and_leaves_nothing(tokenizer, steps):
    core = make_core(tokenizer)
    ids = [i for prompt in PROMPTS for i in core.add(prompt)]
    for _ in range(steps):
        core.step()
    assert [event.finish_reason for event in core.abort(ids[2])] == ["abort"]
    assert core.abort(ids[2]) == []
    core.check()
    run(core, ids)
    assert core.take(ids[0]).token_ids == tuple(answer(PROMPTS[0]))
    # The third prompt waits a step for the others.
    assert core.take(ids[2]).token_ids == tuple(answer(PROMPTS[2])[: max(0, steps - 1)])


def test_refused_request_leaves_nothing(tokenizer):
    core = make_core(tokenizer)
    with pytest.raises(InputError, match="max_model_len"):
        core.add(request([1] * 300))
    assert not core.has_work


def test_choices_have_numbers_and_share_the_prompt(tokenizer):
    core = make_core(tokenizer)
    prompt = request([5] * 50)
    ids = core.add(replace(prompt, params=replace(prompt.params, n=3)))
    run(core, ids)
    assert [core.take(i).num_cached_tokens for i in ids] == [0, 48, 48]


def test_stats_count_what_was_computed(tokenizer):
    core = make_core(tokenizer)
    for _ in range(2):
        ids = core.add(PROMPTS[0])
        run(core, ids)
        core.take(ids[0])
    stats = core.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens) == (30 + 14, 16, 8)
    assert stats.num_running == stats.num_waiting == 0


def test_everything_fails_together_when_the_executor_breaks(tokenizer):
    core = make_core(tokenizer)
    ids = [i for prompt in PROMPTS for i in core.add(prompt)]
    core.step()
    assert {event.finish_reason for event in core.fail_all("broken")} == {"error"}
    assert all(core.take(i).error == "broken" for i in ids)
    core.check()


# --- the thread


@pytest.fixture
def engine(tokenizer):
    made = []

    def make(**options):
        limit = options.pop("max_queued", 100)
        made.append(BackgroundEngine(make_core(tokenizer, **options), limit))
        return made[-1]

    yield make
    for one in made:
        one.stop()


async def collect(engine, prompt):
    (stream,) = await engine.submit(prompt)
    events = [event async for event in stream.events()]
    return events, stream.output


def test_many_callers_get_their_own_answers(engine):
    async def main():
        return await asyncio.gather(*(collect(running, PROMPTS[i % 3]) for i in range(24)))

    running = engine()
    for index, (events, output) in enumerate(asyncio.run(main())):
        expected = answer(PROMPTS[index % 3])
        assert [event.token_id for event in events] == expected
        assert [event.finish_reason is not None for event in events] == [False] * (len(expected) - 1) + [True]
        assert output.token_ids == tuple(expected)


def test_stream_that_is_left_early_aborts_its_request(engine):
    async def main():
        (stream,) = await running.submit(request([5] * 20, max_tokens=200))
        events = stream.events()
        await anext(events)
        await events.aclose()
        left.set()
        while stream.output is None:
            await asyncio.sleep(0.001)
        return stream.output, await collect(running, PROMPTS[0])

    running, left = engine(), threading.Event()
    whole = running._core._executor.run

    def waits(plan):
        """The third step ends only when the listener has gone."""
        assert running._core.stats().num_steps < 2 or left.wait(timeout=60)
        return whole(plan)

    running._core._executor.run = waits
    output, (_, other) = asyncio.run(main())
    assert output.finish_reason == "abort"
    assert len(output.token_ids) == 3
    assert other.token_ids == tuple(answer(PROMPTS[0]))


def test_more_requests_than_may_wait_are_refused(engine):
    async def main():
        long = request([5] * 20, max_tokens=200)
        return await asyncio.gather(*(running.submit(long) for _ in range(12)), return_exceptions=True)

    running = engine(max_queued=3, max_num_seqs=1)
    found = asyncio.run(main())
    assert sum(isinstance(one, OverloadedError) for one in found) >= 7
    assert sum(isinstance(one, list) for one in found) >= 3


def test_request_that_cannot_be_served_is_refused_alone(engine):
    async def main():
        bad, good = running.submit(request([1] * 300)), collect(running, PROMPTS[1])
        return await asyncio.gather(bad, good, return_exceptions=True)

    running = engine()
    bad, (_, output) = asyncio.run(main())
    assert isinstance(bad, InputError)
    assert output.token_ids == tuple(answer(PROMPTS[1]))


def test_broken_step_ends_every_stream_and_the_engine_goes_on(engine):
    running = engine()
    whole = running._core._executor.run
    calls = iter([True, True, False])

    def breaks(plan):
        if next(calls, True):
            return whole(plan)
        raise RuntimeError("device lost")

    running._core._executor.run = breaks

    async def main():
        first = await asyncio.gather(*(collect(running, request([5] * 20, max_tokens=50)) for _ in range(3)))
        return first, await collect(running, PROMPTS[0])

    broken, (_, after) = asyncio.run(main())
    for events, output in broken:
        assert [event.finish_reason for event in events][-1] == "error"
        assert output.error == "RuntimeError: device lost"
    assert after.token_ids == tuple(answer(PROMPTS[0]))


def test_stopped_engine_ends_streams_and_refuses_requests(engine):
    async def main():
        task = asyncio.create_task(collect(running, request([5] * 20, max_tokens=200)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(running.stop)
        with pytest.raises(OverloadedError, match="stopped"):
            await running.submit(PROMPTS[0])
        return await task

    running = engine()
    events, output = asyncio.run(main())
    assert events[-1].finish_reason in ("error", "length")
    assert output.finish_reason == events[-1].finish_reason
