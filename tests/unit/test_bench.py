"""The load generator and its report, against a server that is a function in this process."""

import asyncio
import base64
import json
import re
import subprocess
import sys
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from deepspan.cli.bench import check_url, percentile, read_size, report, summary
from deepspan.errors import ConfigError
from deepspan.loadgen import EventReader, Load, Sample, arrivals, ask, measure, message_of, picture

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


# --- percentiles


def test_percentile_interpolates_between_neighbours():
    values = [40.0, 10.0, 20.0, 30.0]
    assert [percentile(values, share) for share in (0, 0.5, 0.9, 1)] == [10, 25, pytest.approx(37), 40]
    assert percentile([7.0], 0.99) == 7.0
    assert values == [40.0, 10.0, 20.0, 30.0]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentile_equals_that_of_numpy(count):
    values = np.random.default_rng(count).exponential(size=count)
    for share in (0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.999, 1):
        assert percentile(values.tolist(), share) == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_summary_of_nothing_is_none():
    assert summary([]) is None
    assert summary([1.0, 3.0]) == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98})


# --- server-sent events


EVENTS = ['{"a":"é→𝄞"}', "two\nlines", "[DONE]"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_do_not_depend_on_where_the_stream_is_cut(end, size):
    lines = [
        ": a comment", "", f"data: {EVENTS[0]}", "", "event: x", "data:two", "data: lines", "id: 3", "", "",
        "data: [DONE]", "", ": the end", "",
    ]  # fmt: skip
    stream = end.join([*lines, ""]).encode()
    reader = EventReader()
    found = [one for start in range(0, len(stream), size) for one in reader.feed(stream[start : start + size])]
    assert found == EVENTS


def test_event_comes_out_with_the_chunk_that_completes_it():
    reader = EventReader()
    assert [reader.feed(part) for part in (b"data: a\n", b"\nda", b"ta: b\n\n")] == [[], ["a"], ["b"]]
    assert reader.feed(b"data: never ended") == []


def sample_of(*timed, due=0.0):
    sample = Sample(due=due, sent=due)
    for now, data in timed:
        for one in EventReader().feed(data):
            sample.see(one, now)
    return sample


def test_sample_times_output_and_not_the_role():
    sample = sample_of(
        (1, chunk({"role": "assistant", "content": ""})),
        (2, chunk({"reasoning_content": "h"})),
        (4, chunk({"content": "a"})),
        (5, chunk({"tool_calls": [{"index": 0}]})),
        (6, chunk({}, "stop")),
        (7, usage(11, 5, cached=4, image=2)),
        (8, event("[DONE]")),
    )
    assert (sample.outputs, sample.finished, sample.ended, sample.failure) == ([2, 4, 5], 6, 8, None)
    assert sample.tokens() == {"prompt": 11, "cached": 4, "image": 2, "output": 5}


def test_answer_without_any_text_has_its_first_token_where_it_ends():
    assert sample_of((3, chunk({}, "length"))).outputs == [3]


def test_answer_without_usage_counts_pieces():
    sample = sample_of((1, chunk({"content": "a"})), (2, chunk({"content": "b"}, "stop")))
    assert sample.tokens() == {"prompt": 0, "cached": 0, "image": 0, "output": 2}


@pytest.mark.parametrize("data", ["{", "[1]", "null", '{"choices": [3]}', '{"choices": 3}'])
def test_event_that_cannot_be_read_is_a_failure(data):
    assert "cannot be read" in sample_of((1, event(data))).failure


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too\n  long", "code": 500}}, "too long"),
        ({"error": "no"}, "no"),
        ({"object": "error", "message": "gone"}, "gone"),
        ({"detail": [{"loc": 1}]}, '[{"loc": 1}]'),
        ("plain", "plain"),
        ("", "no reason is given"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_message_of_an_error(body, message):
    assert message_of(body) == message


# --- when and what


def test_arrivals_are_a_poisson_process_of_the_seed():
    times = arrivals(20_000, 50.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)
    assert np.quantile(gaps, 0.9) == pytest.approx(np.log(10) / 50, rel=0.03)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert arrivals(20, 50.0, seed=1) == times[:20]
    assert arrivals(20, 50.0, seed=2) != times[:20]
    assert arrivals(1, 50.0, seed=1) == [0]


@pytest.mark.parametrize("size", [(24, 18), (1, 1), (300, 2)])
def test_picture_is_a_png_of_its_size_and_key(size):
    data = picture(size, "a")
    with Image.open(BytesIO(data)) as image:
        assert (image.format, image.size) == ("PNG", size)
    assert data == picture(size, "a")
    assert data != picture(size, "b")


def test_requests_ask_for_exactly_what_the_load_says():
    server = FakeServer()
    _, found = run(server, output_tokens=5, warmup=3, concurrency=4)
    asked = measured(server, found)
    assert (len(asked), found["outside"]["requests"]) == (6, 2 + 3)
    for body in asked:
        assert body | {"messages": None} == {
            "model": "first", "messages": None, "max_tokens": 5, "min_tokens": 5, "ignore_eos": True,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    again = FakeServer()
    run(again, output_tokens=5, warmup=3, concurrency=4)
    other = FakeServer()
    run(other, output_tokens=5, warmup=3, concurrency=4, seed=1)
    assert again.bodies == server.bodies
    assert not {body["messages"][0]["content"] for body in other.bodies} & set(prompts)


@pytest.mark.parametrize("tokens", [1, 50, 200, 1000])
def test_prompts_have_the_length_that_the_server_counts(tokens):
    _, found = run(FakeServer(), prompt_tokens=tokens)
    assert found["load"]["calibrated_prompts"] is True
    assert found["tokens"]["prompt"] / 6 == pytest.approx(max(tokens, 12), abs=2.5)


def test_prompts_share_as_much_as_is_asked_and_pictures_all_differ():
    server = FakeServer()
    _, found = run(server, prompt_tokens=400, shared_prefix=200, images=2)
    asked = [parts_of(body) for body in measured(server, found)]
    assert {tuple(part["type"] for part in parts) for parts in asked} == {("text", "image_url", "image_url", "text")}
    assert len({parts[0]["text"] for parts in asked}) == 1
    assert 5 * len(asked[0][0]["text"].split()) == pytest.approx(200, abs=5)
    assert len({parts[3]["text"] for parts in asked}) == 6
    urls = [part["image_url"]["url"] for parts in asked for part in parts[1:3]]
    assert len(set(urls)) == 12
    for url in urls:
        head, _, data = url.partition(",")
        assert head == "data:image/png;base64"
        assert Image.open(BytesIO(base64.b64decode(data))).size == (24, 18)


def test_prompt_that_is_all_shared_is_the_same_text():
    server = FakeServer()
    _, found = run(server, shared_prefix=100)
    assert len({body["messages"][0]["content"] for body in measured(server, found)}) == 1


# --- loops


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_closed_loop_keeps_so_many_requests_running_and_no_more(concurrency):
    server = FakeServer(meet=min(concurrency, 12))
    _, found = run(server, requests=12, concurrency=concurrency)
    assert server.most == min(concurrency, 12)
    assert found["requests"] == {"ok": 12, "failed": 0, "other_length": 0, "without_usage": 0}
    assert found["load"]["loop"] == "closed"


def test_open_loop_sends_at_its_times_whatever_becomes_of_the_requests():
    server = FakeServer(meet=20)
    result, found = run(server, requests=20, concurrency=None, rate=400.0, seed=5)
    first = result.samples[0].due
    assert [sample.due - first for sample in result.samples] == pytest.approx(arrivals(20, 400.0, seed=5))
    assert server.most == 20
    assert all(sample.sent >= sample.due for sample in result.samples)
    assert (found["load"]["loop"], found["load"]["rate"]) == ("open", 400.0)


def test_open_loop_times_requests_from_when_they_were_due():
    async def late():
        transport = httpx.MockTransport(FakeServer())
        async with httpx.AsyncClient(base_url=URL, transport=transport) as client:
            body = json.dumps({"messages": [{"content": "a"}], "max_tokens": 1}).encode()
            return await ask(client, body, due=-100.0)

    sample = asyncio.run(late())
    result = type("R", (), {"samples": [sample], "outside": [], "seconds": 1.0, "model": "m"})
    result.is_exact = result.is_calibrated = True
    found = report(Load(**BASE), result, URL)
    assert found["latencies"]["time_to_first_token"]["mean"] > 100
    assert found["send_delay"] > 100


# --- the report


def test_report_adds_up():
    samples = []
    for start in (0.0, 10.0):
        timed = [(start + at, chunk({"content": "x"})) for at in (1, 2, 4)]
        timed += [(start + 5, chunk({}, "length")), (start + 6, usage(10, 5, cached=4)), (start + 7, event("[DONE]"))]
        samples.append(sample_of(*timed, due=start))
    samples.append(Sample(due=3.0, sent=3.5, ended=4.0, status=503, failure="busy"))
    result = type("R", (), {"samples": samples, "outside": samples[1:], "seconds": 20.0, "model": "m"})
    result.is_exact, result.is_calibrated = True, False
    found = report(Load(**BASE), result, URL)
    assert found["requests"] == {"ok": 2, "failed": 1, "other_length": 2, "without_usage": 0}
    assert found["failures"] == [{"status": 503, "message": "busy", "count": 1}]
    assert found["tokens"] == {"prompt": 20, "cached": 8, "image": 0, "output": 10}
    assert (found["requests_per_second"], found["output_tokens_per_second"]) == (0.1, 0.5)
    assert found["tokens_per_piece"] == pytest.approx(10 / 6)
    latencies = found["latencies"]
    assert latencies["time_to_first_token"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    assert latencies["inter_token_latency"]["mean"] == 1.5  # gaps 1, 2, 1, 2
    assert latencies["time_per_output_token"]["p99"] == 1.0  # from 1 to 5, four tokens
    assert latencies["latency"]["p50"] == 7
    assert found["send_delay"] == 0.5
    assert found["outside"] == {
        "requests": 2, "failed": 1, "tokens": {"prompt": 10, "cached": 4, "image": 0, "output": 5}
    }  # fmt: skip
    json.dumps(found, allow_nan=False)


def test_failures_of_every_kind_are_counted_by_status_and_message():
    def answer(number, _):
        match number - 2:
            case 0 | 1:
                return httpx.Response(503, json={"error": {"message": "busy"}})
            case 2:
                return httpx.Response(502, text="<html>bad gateway")
            case 3:
                return httpx.Response(200, content=chunk({"content": "x"}) + event({"error": {"message": "broke"}}))
            case 4:
                return httpx.Response(200, content=chunk({"content": "x"}))
            case 5:
                raise httpx.ReadError("reset")
        return None

    _, found = run(FakeServer(answer=answer), requests=8, concurrency=1)
    assert found["requests"]["ok"] == 2
    assert found["requests"]["failed"] == 6
    assert {(f["status"], f["message"], f["count"]) for f in found["failures"]} == {
        (503, "busy", 2),
        (502, "<html>bad gateway", 1),
        (200, "broke", 1),
        (200, "the stream ended before the answer did", 1),
        (None, "ReadError: reset", 1),
    }
    assert found["tokens"]["output"] == 2 * 3


def test_load_whose_requests_all_fail_has_no_latencies():
    def answer(number, _):
        return httpx.Response(500, json={}) if number >= 2 else None

    _, found = run(FakeServer(answer=answer))
    assert found["requests"]["failed"] == 6
    assert set(found["latencies"].values()) == {None}
    json.dumps(found, allow_nan=False)


# --- servers that know less


def test_server_that_knows_no_exact_lengths_is_asked_without():
    server = FakeServer(refuses=("min_tokens",))
    _, found = run(server)
    assert found["load"]["exact_output"] is False
    assert (found["requests"]["ok"], found["outside"]["failed"]) == (6, 1)
    assert not any("min_tokens" in body or "ignore_eos" in body for body in server.bodies)


def test_server_without_usage_gets_a_word_per_token():
    def answer(_, body):
        return httpx.Response(200, content=chunk({"content": "x"}) * body["max_tokens"] + chunk(reason="stop"))

    server = FakeServer(answer=answer)
    _, found = run(server, prompt_tokens=40)
    assert found["load"]["calibrated_prompts"] is False
    assert {len(body["messages"][0]["content"].split()) for body in measured(server, found)} == {40}
    assert (found["requests"]["without_usage"], found["tokens"]["output"]) == (6, 18)


# --- what cannot be


def unreachable(_):
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("server", "options", "parts"),
    [
        (unreachable, {}, ("no server answers at", URL, "refused")),
        (unreachable, {"model": "m"}, (URL, "short question: ConnectError: refused")),
        (lambda _: httpx.Response(401, json={"error": {"message": "wrong key"}}), {}, ("401", "wrong key")),
        (lambda _: httpx.Response(404, json={"error": "m?"}), {"model": "m"}, ("short question: 404 m?",)),
        (lambda _: httpx.Response(400, json={"error": "bad"}), {"model": "m"}, ("short question: 400 bad",)),
        (lambda _: httpx.Response(200, json={"data": []}), {}, ("lists no model",)),
        (lambda _: httpx.Response(200, text="hello"), {}, ("lists no model",)),
        (lambda _: httpx.Response(200, text="hello"), {"model": "m"}, ("the stream ended",)),
        (unreachable, {"url": "http://a b:x/v1"}, ("cannot be asked",)),
        (unreachable, {"api_key": "é"}, ("cannot be asked",)),
    ],
)
def test_server_that_cannot_be_asked_is_one_clear_error(server, options, parts):
    with pytest.raises(ConfigError) as caught:
        run(server, **options)
    assert "\n" not in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_key_and_name_are_sent():
    server = FakeServer()
    run(server, model="mine", api_key="secret")
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert {headers["content-type"] for headers in server.headers} == {"application/json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 2.0}, "either a concurrency"),
        ({"concurrency": None}, "either a concurrency"),
        ({"concurrency": None, "rate": 0.0}, "rate must be above 0"),
        ({"concurrency": None, "rate": float("inf")}, "rate must be above 0"),
        ({"concurrency": None, "rate": float("nan")}, "rate must be above 0"),
        ({"shared_prefix": 101}, "shared_prefix 101"),
    ],
)
def test_load_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Load(**(BASE | change))


@pytest.mark.parametrize("text", ["", "560", "560x", "0x5", "5x0", "-5x5", "9000x5", "5X5", "5x5x5", "5.0x5"])
def test_image_size_that_cannot_be_is_refused(text):
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        read_size(text)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000/v1", "ftp://x/v1", "http://", "http:///v1", "http://x:99999/v1", "http://x:a", "http://[x"],
)
def test_address_that_cannot_be_is_refused(url):
    with pytest.raises(ConfigError, match=re.escape(repr(url))):
        check_url(url)


@pytest.mark.parametrize("url", ["http://x/v1", "https://x.example:443", "http://[::1]:8000/v1"])
def test_address_that_can_be_is_taken(url):
    check_url(url)


def test_image_size_is_width_and_height():
    assert read_size("640x480") == (640, 480)


def test_the_command_does_not_import_torch():
    code = "import sys, deepspan.cli.bench; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
