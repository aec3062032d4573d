"""The load generator: percentiles, events, what is sent and when."""

import base64
from io import BytesIO

import numpy as np
import pytest
from bench_helpers import FakeServer, chunk, event, measured, parts_of, run, sample_of, usage
from PIL import Image

from deepspan.cli.bench import percentile, summary
from deepspan.loadgen import EventReader, arrivals, message_of, picture

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
