"""What a server refuses, survives and ends: bad input, keys, limits, clients that leave, engines that break."""

import json
import socket
import struct
import threading
import time
import zlib

import httpx
import pytest
from server_helpers import NAME, data_url, image_part, picture, serving

from deepspan.server.media import MediaPolicy

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
HEADER = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
BOMB = (
    b"\x89PNG\r\n\x1a\n"
    + struct.pack(">I", 13)
    + HEADER
    + struct.pack(">I", zlib.crc32(HEADER))
    + struct.pack(">I", 8)
    + b"IDAT"
    + b"\0" * 12
)


def body(messages=HELLO, **fields):
    return {"model": NAME, "messages": messages, "max_completion_tokens": 4, **fields}


def with_image(url):
    return body([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder, max_body_bytes=300_000, cors_origins=("https://a.example",)) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "status", "param", "message"),
    [
        (body([]), 400, "messages", "messages is empty"),
        ({"model": NAME}, 400, "messages", "Field required"),
        (body(temperature=2.5), 400, "temperature", "less than or equal to 2"),
        (body(temperature="1"), 400, "temperature", "valid number"),
        (body(n=True), 400, "n", "valid integer"),
        (body(top_p=0), 400, "top_p", "greater than 0"),
        (body(top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
        (body(stop=[""]), 400, "stop", "at least 1 character"),
        (body(stop=""), 400, "stop", "must not be empty"),
        (body(logit_bias={"x": 1}), 400, "logit_bias", "no token id"),
        (body(max_completion_tokens=10**6), 400, "max_tokens", "more than max_model_len"),
        (body(stream_options={"include_usage": True}), 400, "stream_options", "needs stream true"),
        (
            body(stream=True, stream_options={"continuous_usage_stats": True}),
            *(400, "stream_options.continuous_usage_stats", "comes with the last chunk"),
        ),
        (body(functions=[{}]), 400, "functions", "functions is not supported: use tools"),
        (body(best_of=3), 400, "best_of", "best_of is not supported"),
        (body(store=True), 400, "store", "not stored"),
        (body(tools=[{"type": "web_search"}]), 400, "tools[0].type", "must be function"),
        (body(tool_choice="required"), 400, "tool_choice", "no tools are given"),
        (body(thinking={"type": "perhaps"}), 400, "thinking.type", "must be one of"),
        (body(reasoning_effort="lots"), 400, "reasoning_effort", "must be one of"),
        (body(response_format={"type": "xml"}), 400, "response_format.type", "response_format.type must be"),
        (body(structured_outputs={"regex": "("}), 400, "grammar", "grammar"),
        (body(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs", "exactly one of"),
        (body([{"role": "robot", "content": "x"}]), 400, "messages[0].role", "must be one of"),
        (body([{"role": "user", "content": "a\ud800"}]), 400, "messages[0].content", "lone surrogate"),
        (body([{"role": "user", "content": "x" * 200_000}]), 400, "messages", "more than max_model_len"),
        (body(model="gpt-9"), 404, "model", "does not exist"),
        (with_image("http://127.0.0.1/x.png"), 400, "messages[0].content[0]", "does not fetch"),
        (with_image("file:///etc/passwd"), 400, "messages[0].content[0]", "file"),
        (with_image("/etc/passwd"), 400, "messages[0].content[0]", "data:"),
        (with_image("data:image/png;base64,@@@@"), 400, "messages[0].content[0]", "base64"),
        (with_image(data_url(picture(1)[:60])), 400, "messages[0].content[0]", "truncated or broken"),
        (with_image(data_url(b"<svg/>", "image/svg+xml")), 400, "messages[0].content[0]", "JPEG, PNG, GIF or WebP"),
        (with_image(data_url(BOMB)), 400, "messages[0].content[0]", "pixels"),
    ],
)  # fmt: skip
def test_chat_bad_field_is_refused_by_name(http, sent, status, param, message):
    answer = http.post(CHAT, content=json.dumps(sent), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert "/etc" not in error["message"]


def test_chat_prompt_over_the_context_has_its_own_code(http):
    error = http.post(CHAT, json=body([{"role": "user", "content": "x" * 200_000}])).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "131072" in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"messages": NaN}', "application/json", 400),
        (b'{"messages": 1e999}', "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "application/json", 400),
        (b"{}", "text/plain", 400),
        (b" " * 300_001, "application/json", 413),
    ],
)
def test_body_that_is_no_request_is_refused(http, content, kind, status):
    assert http.post(CHAT, content=content, headers={"content-type": kind}).status_code == status


def test_body_is_counted_as_it_comes_not_as_it_is_announced(http):
    def endless():
        for _ in range(100):
            yield b" " * 10_000

    assert http.post(CHAT, content=endless(), headers={"content-type": "application/json"}).status_code == 413


def test_field_that_nobody_knows_is_served_with_a_word(http, model_folder):
    answer = http.post(CHAT, json=body(shiny=1, user="me", store=False, seed=None))
    assert (answer.status_code, answer.headers["x-deepspan-unknown-fields"]) == (200, "shiny")
    with serving(model_folder, strict=True) as strict:
        refused = httpx.post(strict.url + CHAT, json=body(shiny=1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "shiny")


def test_path_method_and_form_of_errors(http):
    assert http.get("/v1/nothing").status_code == 404
    assert http.get(CHAT).status_code == 405
    error = http.post("/v1/messages", json={"messages": HELLO}).json()
    assert error["type"] == "error"
    assert error["error"] == {"type": "invalid_request_error", "message": "max_tokens is required"}


def test_request_id_and_origin_are_answered(http):
    answer = http.get("/health", headers={"x-request-id": "mine-1", "origin": "https://a.example"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    odd = http.get("/health", headers={"x-request-id": "a b", "origin": "https://b.example"})
    assert odd.headers["x-request-id"] != "a b"
    assert "access-control-allow-origin" not in odd.headers


def test_key_is_asked_for_everywhere_but_at_the_open_paths(model_folder):
    with serving(model_folder, api_keys=("one", "two"), guard_metrics=True) as running:

        def status(path, method="GET", **headers):
            return httpx.request(method, running.url + path, headers=headers, json=body()).status_code

        for path in ("/v1/models", "/metrics", "/tokenize", "//v1/models", "/V1/models", "/openapi.json", "/nothing"):
            assert status(path) == 401, path
        assert status("/v1/models", authorization="Bearer wrong") == 401
        assert status("/v1/models", authorization="Bearer two") == 200
        assert status(CHAT, "POST", **{"x-api-key": "one"}) == 200
        assert [status(path) for path in ("/health", "/version", "/ping")] == [200] * 3


def test_image_of_the_allowed_folder_is_read_and_no_other(model_folder, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(picture(1))
    (tmp_path / "b.png").write_bytes(picture(1))
    with serving(model_folder, policy=MediaPolicy(file_root=tmp_path / "in")) as running:
        url = (tmp_path / "in" / "a.png").as_uri()
        assert httpx.post(running.url + CHAT, json=with_image(url)).status_code == 200
        refused = httpx.post(running.url + CHAT, json=with_image((tmp_path / "b.png").as_uri()))
        assert refused.status_code == 400
        assert str(tmp_path) not in refused.text


def long_request(url, stream=True):
    fields = {"stream": stream, "ignore_eos": True, "max_completion_tokens": 100_000}
    return httpx.stream("POST", url + CHAT, json=body(**fields), timeout=60)


def test_client_that_leaves_a_stream_frees_everything(server):
    before = server.service.metrics
    with long_request(server.url) as answer:
        lines = answer.iter_lines()
        while "content" not in next(lines):
            pass
        assert server.stats.num_running == 1
    wait_for(lambda: server.stats.num_running == 0)
    server.check_idle()
    wait_for(lambda: 'finished_reason="abort"' in before.text().decode())  # counted where the stream ends


def test_client_that_leaves_a_whole_answer_frees_everything(server):
    content = json.dumps(body(ignore_eos=True, max_completion_tokens=100_000)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + content)
        wait_for(lambda: server.stats.num_running == 1)
    wait_for(lambda: server.stats.num_running == 0)
    server.check_idle()


def test_request_over_its_time_is_ended_and_says_so(model_folder):
    with serving(model_folder, request_timeout=0.3) as running:
        slow = body(ignore_eos=True, max_completion_tokens=100_000)
        assert httpx.post(running.url + CHAT, json=slow, timeout=60).status_code == 504
        with long_request(running.url) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert json.loads(lines[-2][6:])["error"]["code"] == 504
        assert lines[-1] == "data: [DONE]"
        wait_for(lambda: running.stats.num_running == 0)
        running.check_idle()


def test_request_beyond_the_queue_gets_429_and_may_come_again(model_folder):
    from deepspan import EngineConfig

    options = {"engine": EngineConfig(max_num_seqs=1)}
    with serving(model_folder, llm_options=options, max_queued=1) as running:
        with long_request(running.url) as first:
            lines = first.iter_lines()  # kept: a reader that is dropped closes its answer
            next(lines)
            wait_for(lambda: running.stats.num_running == 1)
            with long_request(running.url) as second:
                more = second.iter_lines()
                next(more)
                wait_for(lambda: running.stats.num_waiting == 1)
                refused = httpx.post(running.url + CHAT, json=body())
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wait_for(lambda: running.stats.num_running + running.stats.num_waiting == 0)
        assert httpx.post(running.url + CHAT, json=body(), timeout=60).status_code == 200


def test_engine_fault_is_one_requests_500_and_the_server_lives(server, http, monkeypatch):
    runner = server.service.llm.llm._runner
    monkeypatch.setattr(runner, "_network", None)
    failed = http.post(CHAT, json=body())
    assert failed.status_code == 500
    assert "engine failed" in failed.json()["error"]["message"]
    with http.stream("POST", CHAT, json=body(stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-2][6:])["error"]["type"] == "InternalServerError"
    monkeypatch.undo()
    assert http.post(CHAT, json=body()).status_code == 200
    server.check_idle()


def test_engine_that_died_fails_health_and_every_request(model_folder, monkeypatch):
    with serving(model_folder) as running:

        def die():
            raise MemoryError("gone")

        monkeypatch.setattr(running.service.llm.llm.core, "step", die)
        failed = httpx.post(running.url + CHAT, json=body(), timeout=60)
        assert failed.status_code == 500
        wait_for(lambda: httpx.get(f"{running.url}/health").status_code == 503)
        assert httpx.post(running.url + CHAT, json=body(), timeout=60).status_code == 503


def test_stopping_lets_running_requests_end_and_takes_no_new_ones(model_folder):
    with serving(model_folder, drain_timeout=30.0) as running:
        found = {}

        def ask():
            sent = body(ignore_eos=True, max_completion_tokens=60)
            found["answer"] = httpx.post(running.url + CHAT, json=sent, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: running.stats.num_running == 1)
        running.server.stop()
        wait_for(lambda: running.service.draining)
        running.stop()
        asking.join(60)
    assert found["answer"].status_code == 200
    assert found["answer"].json()["usage"]["completion_tokens"] == 60


def test_image_parts_of_every_spelling_are_one_picture(http):
    url = data_url(picture(2))
    spellings = [
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        image_part(picture(2)),
    ]
    answers = []
    for part in spellings:
        sent = body([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], logprobs=True)
        found = http.post(CHAT, json=sent).json()
        answers.append([entry["logprob"] for entry in found["choices"][0]["logprobs"]["content"]])
    assert all(answer == answers[0] for answer in answers)


def test_client_that_leaves_before_the_first_event_frees_everything(server):
    """Events that nobody asked for yet have no part that could clean up."""
    import asyncio

    from deepspan.server.app import create_app

    content = json.dumps(body(stream=True, ignore_eos=True, max_completion_tokens=100_000)).encode()
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"}, "scheme": "http",
        "http_version": "1.1", "client": None, "server": None, "root_path": "",
    }  # fmt: skip
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        # The client is gone the moment its request is accepted.
        if messages:
            return messages.pop(0)
        while server.stats.num_running + server.stats.num_waiting == 0:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        raise OSError("nobody is there")

    asyncio.run(create_app(server.service)(scope, receive, send))
    wait_for(lambda: server.stats.num_running + server.stats.num_waiting == 0)
    server.check_idle()
