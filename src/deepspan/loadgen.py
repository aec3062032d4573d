"""Load for any server that speaks the OpenAI API: prompts and pictures made from a seed, sent on time, and timed.

Owns what is sent, when it is sent, and what is measured of each request. Invariants: no torch; everything that is sent
is made before the clock starts; the same load gives the same bytes in the same order; a request is timed from when it
was due, so that a generator that falls behind cannot flatter the server; a failure is kept with its reason.
Called by `cli.bench`.
"""

import asyncio
import base64
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate
from typing import Any

import httpx
from PIL import Image, ImageDraw

from deepspan.errors import ConfigError

# Short and common: one token each for most tokenizers, so that prompts of a wanted length can be put together.
WORDS = (
    "time year life work hand part case week home room area book word fact side kind head line game rate town food "
    "land form road door city name body view tree fire wind rain snow song bird fish ship gold iron wood king moon star"
).split()
DONE = "[DONE]"
LINE_END = re.compile(rb"\r\n|\n|\r")
OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
PROBE_WORDS = (8, 72)
# Servers close idle connections after some seconds, uvicorn after 5; one that is taken up at that moment would fail.
KEEP_SECONDS = 2.0
CONNECT_SECONDS = 30.0
MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for. Lengths are tokens.

    concurrency: requests at once, a new one when one ends (closed loop); rate: requests per second, whatever becomes of
    them (open loop); one of the two. prompt_tokens: of text, about; images come on top. output_tokens: exact where the
    server knows how. images: pictures of a request, of `image_size` (width, height). shared_prefix: how much of the
    prompt is the same in all requests, about. warmup: requests before the measured ones. Raises ConfigError.
    """

    requests: int
    concurrency: int | None
    rate: float | None
    prompt_tokens: int
    output_tokens: int
    images: int
    image_size: tuple[int, int]
    shared_prefix: int
    seed: int
    warmup: int

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("a load has either a concurrency (closed loop) or a rate (open loop)")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"rate must be above 0 requests per second, found {self.rate}")
        if self.shared_prefix > self.prompt_tokens:
            raise ConfigError(f"shared_prefix {self.shared_prefix} is more than prompt_tokens {self.prompt_tokens}")


@dataclass(slots=True, kw_only=True)
class Sample:
    """What was measured of one request. Times are seconds of `time.perf_counter`.

    due, sent: when it should have been sent, and was. outputs: when pieces of output came. finished: when the answer
    was said to be over. ended: last event. status: of HTTP, None without an answer. failure: why it counts as failed.
    """

    due: float
    sent: float
    outputs: list[float] = field(default_factory=list)
    finished: float | None = None
    ended: float = math.nan
    usage: dict[str, Any] | None = None
    status: int | None = None
    failure: str | None = None

    def see(self, data: str, now: float) -> None:
        """Read one event of the stream."""
        self.ended = now
        try:
            if data != DONE:
                self._read(json.loads(data), now)
        except (ValueError, AttributeError, TypeError):
            self.failure = self.failure or f"an event cannot be read: {data[:80]}"

    def _read(self, event: dict[str, Any], now: float) -> None:
        if event.get("error") or event.get("object") == "error":
            self.failure = self.failure or message_of(event)
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
            # Tokens without text of their own (half a character) leave no trace but the end.
            if any(delta.get(name) for name in OUTPUT_FIELDS) or (reason and not self.outputs):
                self.outputs.append(now)
            if reason:
                self.finished = now

    def tokens(self) -> dict[str, int]:
        """As the server counts them: prompt, cached, image, output. Output is counted in pieces if it does not."""
        usage = self.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return {
            "prompt": usage.get("prompt_tokens") or 0,
            "cached": details.get("cached_tokens") or usage.get("prompt_cache_hit_tokens") or 0,
            "image": details.get("image_tokens") or 0,
            "output": len(self.outputs) if self.usage is None else usage.get("completion_tokens") or 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """samples: of the measured requests, in the order of their numbers. outside: of those before them.

    seconds: from when the first one was due to the end of the last. is_exact: whether the server was told the exact
    length of answers. is_calibrated: whether the length of prompts follows from how the server counts.
    """

    model: str
    samples: list[Sample]
    outside: list[Sample]
    seconds: float
    is_exact: bool
    is_calibrated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How a server counts text: tokens = overhead + per_word * words."""

    overhead: float
    per_word: float


class EventReader:
    """Server-sent events from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the events that are complete now. Comments and other fields are left out."""
        events: list[str] = []
        data = self._rest + chunk
        end = len(data) - data.endswith(b"\r")  # that may be half of a CRLF: it waits
        *lines, rest = LINE_END.split(data[:end])
        self._rest = rest + data[end:]
        for line in lines:
            if not line:
                events += ["\n".join(self._lines)] if self._lines else []
                self._lines = []
            elif line.partition(b":")[0] == b"data":
                self._lines.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process are due; the first at 0. Same seed, same times."""
    rng = random.Random(f"{seed}:arrivals")
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def picture(size: tuple[int, int], key: str) -> bytes:
    """A PNG of coloured shapes; another `key`, another picture. Flat colours keep requests small."""
    rng, (width, height) = random.Random(key), size

    def color() -> tuple[int, int, int]:
        return rng.randrange(256), rng.randrange(256), rng.randrange(256)

    image = Image.new("RGB", size, color())
    draw = ImageDraw.Draw(image)
    for number in range(12):
        x0, x1 = sorted(rng.randrange(width) for _ in range(2))
        y0, y1 = sorted(rng.randrange(height) for _ in range(2))
        (draw.ellipse if number % 2 else draw.rectangle)((x0, y0, x1, y1), fill=color())
    for _ in range(min(64, width * height)):  # specks: shapes of a small picture may hide each other
        image.putpixel((rng.randrange(width), rng.randrange(height)), color())
    out = BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def words(count: int, key: str) -> list[str]:
    return random.Random(key).choices(WORDS, k=count)


def messages_of(load: Load, counting: Counting, key: str) -> list[dict[str, Any]]:
    """One user message: the shared beginning, pictures, the rest."""
    total = max(1, round((load.prompt_tokens - counting.overhead) / counting.per_word))
    num_shared = min(total, round(load.shared_prefix / counting.per_word))
    shared = words(num_shared, f"{load.seed}:shared")
    own = words(total - num_shared, f"{load.seed}:{key}")
    if not load.images:  # plain text, which every server takes
        return [{"role": "user", "content": " ".join([*shared, *own])}]
    content: list[dict[str, Any]] = [{"type": "text", "text": " ".join(shared)}] if shared else []
    for number in range(load.images):
        data = base64.b64encode(picture(load.image_size, f"{load.seed}:{key}:{number}")).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    if own:
        content.append({"type": "text", "text": " ".join(own)})
    return [{"role": "user", "content": content}]


def body_of(model: str, messages: Sequence[dict[str, Any]], output_tokens: int, *, exact: bool) -> bytes:
    """A request for a streamed answer. exact: with the fields that keep an answer from ending early."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if exact:
        body |= {"ignore_eos": True, "min_tokens": output_tokens}
    return json.dumps(body).encode()


async def measure(
    load: Load,
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    timeout: float,
    progress: Callable[[int, int], None],
    transport: httpx.AsyncBaseTransport | None = None,
) -> Result:
    """Run a load against the API at `url` (with its /v1).

    model: the first one that the server lists if None. timeout: seconds without a byte that make a request fail.
    progress: called with the numbers of requests that have ended and of all. transport: in place of the network.
    Raises ConfigError if no server answers there, or it refuses what every request would ask for.
    """
    try:
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
            limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),  # as many connections as there are requests
            transport=transport,
        )
    except (httpx.InvalidURL, ValueError) as error:  # a key that no header can hold
        raise ConfigError(f"{url} cannot be asked: {error}") from error
    async with client:
        name = model or await _first_model(client)
        counting, is_exact, outside = await _probe(client, load, name)

        def body(key: str) -> bytes:
            measured = messages_of(load, counting or Counting(overhead=0.0, per_word=1.0), key)
            return body_of(name, measured, load.output_tokens, exact=is_exact)

        warming = [body(f"warm-up {number}") for number in range(load.warmup)]
        bodies = [body(str(number)) for number in range(load.requests)]
        outside += await _closed_loop(client, warming, load.concurrency or 1, lambda _: None)
        ended = 0

        def count(_: Sample) -> None:
            nonlocal ended
            ended += 1
            progress(ended, load.requests)

        if load.rate is None:
            samples = await _closed_loop(client, bodies, load.concurrency or 1, count)
        else:
            samples = await _open_loop(client, bodies, arrivals(load.requests, load.rate, load.seed), count)
    return Result(
        model=name,
        samples=samples,
        outside=outside,
        seconds=max(sample.ended for sample in samples) - min(sample.due for sample in samples),
        is_exact=is_exact,
        is_calibrated=counting is not None,
    )


async def ask(client: httpx.AsyncClient, body: bytes, due: float) -> Sample:
    """Send one request and read its answer to the end. Never raises for what the server or the network does."""
    sample, reader = Sample(due=due, sent=time.perf_counter()), EventReader()
    try:
        async with client.stream("POST", "chat/completions", content=body) as response:
            sample.status = response.status_code
            if response.status_code != httpx.codes.OK:
                sample.failure = _message_of_body(await response.aread())
            else:
                async for chunk in response.aiter_bytes():
                    now = time.perf_counter()  # before parsing, which is not the server's time
                    for data in reader.feed(chunk):
                        sample.see(data, now)
                if sample.finished is None and sample.failure is None:
                    sample.failure = "the stream ended before the answer did"
    except httpx.HTTPError as error:
        sample.failure = _reason(error)
    if sample.failure is not None or math.isnan(sample.ended):
        sample.ended = time.perf_counter()
    return sample


def message_of(body: Any) -> str:
    """What an error says, in the forms that servers give it."""
    found = body
    if isinstance(body, dict):
        inner = body.get("error")
        inner = inner.get("message") if isinstance(inner, dict) else inner
        found = inner or body.get("message") or body.get("detail") or body
    text = found if isinstance(found, str) else json.dumps(found)
    return " ".join(text.split())[:MAX_MESSAGE] or "no reason is given"


def _message_of_body(body: bytes) -> str:
    try:
        return message_of(json.loads(body))
    except ValueError:
        return message_of(body.decode("utf-8", "replace"))


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("models")
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {client.base_url}: {_reason(error)}") from error
    if response.status_code != httpx.codes.OK:
        raise ConfigError(f"{response.url} answers {response.status_code}: {_message_of_body(response.content)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{response.url} lists no model; give --model") from error


async def _probe(client: httpx.AsyncClient, load: Load, model: str) -> tuple[Counting | None, bool, list[Sample]]:
    """Ask two short questions to learn how the server counts, and whether it knows exact lengths.

    Raises ConfigError if it refuses even those: every request would fail for the same reason.
    """
    asked: list[Sample] = []

    async def probe(num_words: int, *, exact: bool) -> Sample:
        text = " ".join(words(num_words, f"{load.seed}:probe {num_words}"))
        body = body_of(model, [{"role": "user", "content": text}], 1, exact=exact)
        asked.append(await ask(client, body, time.perf_counter()))
        return asked[-1]

    few, many = PROBE_WORDS
    first = await probe(few, exact=True)
    is_exact = first.status not in (400, 422)  # a server may know neither ignore_eos nor min_tokens
    if not is_exact:
        first = await probe(few, exact=False)
    second = await probe(many, exact=is_exact) if first.failure is None else first
    if second.failure is not None:
        status = "" if second.status is None else f" {second.status}"
        raise ConfigError(f"{client.base_url} does not answer a short question:{status} {second.failure}")
    per_word = (second.tokens()["prompt"] - first.tokens()["prompt"]) / (many - few)
    if per_word <= 0:
        return None, is_exact, asked
    return Counting(overhead=first.tokens()["prompt"] - few * per_word, per_word=per_word), is_exact, asked


async def _closed_loop(
    client: httpx.AsyncClient, bodies: Sequence[bytes], concurrency: int, seen: Callable[[Sample], None]
) -> list[Sample]:
    gate = asyncio.Semaphore(concurrency)  # first come, first served

    async def work(body: bytes) -> Sample:
        async with gate:
            sample = await ask(client, body, time.perf_counter())
        seen(sample)
        return sample

    return await asyncio.gather(*map(work, bodies))


async def _open_loop(
    client: httpx.AsyncClient, bodies: Sequence[bytes], offsets: Sequence[float], seen: Callable[[Sample], None]
) -> list[Sample]:
    start = time.perf_counter()

    async def work(body: bytes, offset: float) -> Sample:
        await asyncio.sleep(start + offset - time.perf_counter())
        sample = await ask(client, body, start + offset)
        seen(sample)
        return sample

    return await asyncio.gather(*map(work, bodies, offsets))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
