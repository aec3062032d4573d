"""Runs of the load generator: loops, reports, servers that know less, what cannot be."""

import asyncio
import json
import re
import subprocess
import sys

import httpx
import pytest
from bench_helpers import BASE, URL, FakeServer, chunk, event, measured, run, sample_of, usage

from deepspan.cli.bench import check_url, read_size, report
from deepspan.errors import ConfigError
from deepspan.loadgen import Load, Sample, arrivals, ask

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
