"""A server made of answers, for tests of the load generator."""

import asyncio
import json

import httpx

from deepspan.cli.bench import report
from deepspan.loadgen import EventReader, Load, Sample, measure

URL = "http://bench.test/v1"
BASE = {
    "requests": 6,
    "concurrency": 2,
    "rate": None,
    "prompt_tokens": 100,
    "output_tokens": 3,
    "images": 0,
    "image_size": (24, 18),
    "shared_prefix": 0,
    "seed": 0,
    "warmup": 0,
}


def event(value):
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chunk(delta=None, reason=None):
    return event({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}]})


def usage(prompt, output, cached=0, image=0):
    details = {"cached_tokens": cached, "image_tokens": image}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


class Body(httpx.AsyncByteStream):
    """Pieces of a stream, after a while."""

    def __init__(self, pieces, wait, done):
        self._pieces, self._wait, self._done = pieces, wait, done

    async def __aiter__(self):
        await self._wait()
        for piece in self._pieces:
            await asyncio.sleep(0)
            yield piece
        self._done()


class FakeServer:
    """Five tokens for a word and seven for the template; answers of as many tokens as are asked for.

    meet: how many requests must have run at once before the measured ones are answered; without a probe or warm-up.
    """

    def __init__(self, *, meet=0, answer=None, refuses=()):
        self.meet, self.refuses = meet, refuses
        self.answer = answer or (lambda number, body: None)
        self.bodies, self.running, self.most, self.headers = [], 0, 0, []

    def __call__(self, request):
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        assert (request.method, request.url.path) == ("POST", "/v1/chat/completions")
        body = json.loads(request.content)
        if refused := [name for name in self.refuses if name in body]:
            return httpx.Response(400, json={"error": {"message": f"{refused[0]} is unknown"}})
        self.bodies.append(body)
        special = self.answer(len(self.bodies) - 1, body)
        if special is not None:
            return special
        texts = [part["text"] for part in parts_of(body) if part["type"] == "text"]
        prompt = 7 + 5 * sum(len(text.split()) for text in texts)
        self.running += 1
        self.most = max(self.most, self.running)
        tokens = [chunk({"content": "x"}) for _ in range(body["max_tokens"])]
        pieces = [chunk({"role": "assistant", "content": ""}), *tokens, chunk(reason="length")]
        pieces += [usage(prompt, body["max_tokens"], cached=3), event("[DONE]")]
        return httpx.Response(200, stream=Body(pieces, self._meet, self._end))

    async def _meet(self):
        for _ in range(5000 if len(self.bodies) > 2 else 0):  # gives up at last, so that a wrong generator fails
            await asyncio.sleep(0.002)
            if self.most >= self.meet:
                return

    def _end(self):
        self.running -= 1


def parts_of(body):
    content = body["messages"][0]["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def run(server, *, model=None, api_key=None, url=URL, **load):
    load = Load(**(BASE | load))
    seen = []
    result = asyncio.run(
        measure(
            load,
            url=url,
            model=model,
            api_key=api_key,
            timeout=5.0,
            progress=lambda done, total: seen.append((done, total)),
            transport=httpx.MockTransport(server),
        )
    )
    assert seen == [(number, load.requests) for number in range(1, load.requests + 1)]
    return result, report(load, result, url)


def measured(server, report):
    return server.bodies[report["outside"]["requests"] :]


def sample_of(*timed, due=0.0):
    sample = Sample(due=due, sent=due)
    for now, data in timed:
        for one in EventReader().feed(data):
            sample.see(one, now)
    return sample
