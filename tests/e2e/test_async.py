"""The asyncio API on a tiny checkpoint: many callers, one answer each."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from deepspan import LLM, AsyncLLM, SamplingParams
from deepspan.errors import ImageError, InputError

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def ask(*parts):
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": content}]


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (18, 24, 3), dtype=np.uint8))


CONVERSATIONS = [
    ask("hello"),
    ask(picture(1), "what?"),
    ask(picture(1), "else?"),
    ask("A", picture(2), "B", picture(3)),
]


@pytest.fixture(scope="module")
def solo(llm):
    return [llm.chat(conversation, SHORT) for conversation in CONVERSATIONS]


def serve(model_folder, work):
    async def main():
        async with AsyncLLM(LLM(model_folder, device="cpu")) as served:
            return await work(served)

    return asyncio.run(main())


def test_callers_at_once_get_the_answers_they_get_alone(model_folder, solo):
    async def work(served):
        return await asyncio.gather(*(served.chat(CONVERSATIONS[i % 4], SHORT) for i in range(16)))

    assert serve(model_folder, work) == [[solo[i % 4]] for i in range(16)]


def test_stream_adds_up_and_a_bad_request_fails_alone(model_folder, solo):
    async def stream(served):
        return [event async for event in served.stream_chat(CONVERSATIONS[1], SHORT)]

    async def work(served):
        broken, foreign = served.chat(ask(b"no picture", "?"), SHORT), served.generate([10**6], SHORT)
        return await asyncio.gather(stream(served), broken, foreign, return_exceptions=True)

    events, broken, foreign = serve(model_folder, work)
    assert "".join(event.text for event in events) == solo[1].text
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
    assert isinstance(broken, ImageError)
    assert isinstance(foreign, InputError)


def test_choices_and_prefix_hits_are_reported(model_folder):
    async def work(served):
        prompt = "x" * 300
        first = await served.generate(prompt, SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3))
        again = await served.generate(prompt, SHORT)
        return first, again, served.stats

    first, again, stats = serve(model_folder, work)
    assert len(first) == 2
    assert first[0].token_ids != first[1].token_ids
    assert again[0].num_cached_tokens == 256
    assert stats.num_cached_tokens >= 2 * 256


def test_cancelled_call_leaves_nothing_running(model_folder, solo):
    async def work(served):
        task = asyncio.create_task(served.chat(CONVERSATIONS[1], SamplingParams(max_tokens=2000, ignore_eos=True)))
        while served.stats.num_running == 0:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while served.stats.num_running:
            await asyncio.sleep(0.002)
        return await served.chat(CONVERSATIONS[0], SHORT)

    assert serve(model_folder, work) == [solo[0]]
