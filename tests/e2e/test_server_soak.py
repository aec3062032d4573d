"""Many clients at once: mixed requests with their images, random departures, and answers equal to those alone."""

import asyncio
import json
import random

import httpx
import pytest
from server_helpers import NAME, image_part, picture, serving

CHAT = "/v1/chat/completions"
KINDS = 12


def request(kind):
    """One of twelve requests: text short and long, one to three images, sampled, thinking, structured."""
    words = " ".join(f"w{kind}" for _ in range(1 + 40 * (kind % 3)))
    images = [image_part(picture(kind + n, size=(20 + 7 * n, 18 + kind))) for n in range(kind % 4)]
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": [*images, {"type": "text", "text": words}]}],
        "max_completion_tokens": 4 + kind,
        "logprobs": kind % 2 == 0,
        "seed": kind,
        "temperature": 1.0 if kind % 5 == 4 else 0.0,
        "reasoning_effort": "low" if kind % 6 == 5 else "none",
    }
    if kind % 4 == 1:
        body["structured_outputs"] = {"regex": "[a-z]{3,9}"}
    return body


def logprobs_of(choice):
    return [one["logprob"] for one in (choice.get("logprobs") or {"content": []})["content"]]


def outcome(answer):
    """What must not depend on anything around a request."""
    choice = answer["choices"][0]
    message = choice["message"]
    return message["content"], message.get("reasoning"), choice["finish_reason"], logprobs_of(choice)


async def whole(client, kind):
    answer = await client.post(CHAT, json=request(kind))
    assert answer.status_code == 200, answer.text
    return outcome(answer.json())


async def streamed(client, kind):
    """The same through a stream; log-probabilities and all."""
    content, reasoning, logprobs, reason = "", "", [], None
    async with client.stream("POST", CHAT, json=request(kind) | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                content += choice["delta"].get("content") or ""
                reasoning += choice["delta"].get("reasoning") or ""
                logprobs += logprobs_of(choice)
                reason = choice["finish_reason"] or reason
    return (content or None) if reasoning else content, reasoning or None, reason, logprobs


async def departed(client, kind, rng):
    """A client that goes away at some moment."""
    try:
        async with asyncio.timeout(rng.random() * 0.5):
            await (streamed if rng.random() < 0.5 else whole)(client, kind)
    except TimeoutError:
        pass


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder, max_queued=10_000) as running:
        yield running


@pytest.fixture(scope="module")
def solo(server):
    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return [await whole(client, kind) for kind in range(KINDS)]

    # Texts to the letter; log-probabilities to the rounding of other batch shapes, which is all a batch may change.
    return [(*texts, pytest.approx(logprobs, abs=1e-4)) for *texts, logprobs in asyncio.run(main())]


def run_all(server, make):
    async def main():
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*make(client))

    return asyncio.run(main())


def test_64_mixed_requests_at_once_are_answered_as_alone(server, solo):
    found = run_all(server, lambda client: [(whole, streamed)[n % 2](client, n % KINDS) for n in range(64)])
    assert found == [solo[n % KINDS] for n in range(64)]
    server.check_idle()


def test_500_mixed_requests_with_departures_leave_nothing_and_change_nothing(server, solo):
    rng = random.Random(7)
    wanted = {}

    def make(client):
        for number in range(500):
            kind = rng.randrange(KINDS)
            if rng.random() < 0.4:
                yield departed(client, kind, rng)
            else:
                wanted[number] = solo[kind]
                yield rng.choice((whole, streamed))(client, kind)

    found = run_all(server, make)
    assert {number: found[number] for number in wanted} == wanted

    async def settle():
        while server.stats.num_running or server.stats.num_waiting:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(settle(), 60))
    server.check_idle()
    assert server.service.num_active == 0


def test_long_prompt_being_prepared_leaves_health_answering(server):
    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            body = {"model": NAME, "messages": [{"role": "user", "content": "many words " * 100_000}]}
            slow = asyncio.create_task(client.post("/tokenize", json=body))
            answered = 0
            while not slow.done():
                assert (await client.get("/health")).status_code == 200
                answered += 1
            assert (await slow).json()["error"]["code"] == "context_length_exceeded"
            return answered

    assert asyncio.run(main()) > 3
