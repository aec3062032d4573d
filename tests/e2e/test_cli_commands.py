"""`deepspan bench serve` against a real server, and `deepspan chat` with piped lines, both through the entry point."""

import io
import json
import re
import socket
import sys
import urllib.request

import pytest
from server_helpers import picture, serving

from deepspan import ChatOptions, SamplingParams
from deepspan.cli.main import main

PARAMS = SamplingParams(max_tokens=6)
SMALL = ("--prompt-tokens", 60, "--output-tokens", 4, "--requests", 5, "--warmup", 2)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command on lines of input; its exit code, stdout and stderr, without colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments, lines=()):
        monkeypatch.setattr(sys, "argv", ["deepspan", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)

    return command


# --- bench


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder) as running:
        yield running


@pytest.fixture
def metrics(server):
    """What the server has counted since the test began."""

    def read():
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            text = response.read().decode()
        found = {}
        for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found

    before = read()
    return lambda: {name: value - before.get(name, 0) for name, value in read().items()}


@pytest.mark.parametrize("loop", [("--concurrency", 3), ("--rate", 200)])
def test_bench_agrees_with_what_the_server_counted(run, server, metrics, loop):
    options = ("--images", 2, "--image-size", "24x18", "--prompt-tokens", 330, "--shared-prefix", 270, "--json")
    seed = ("--seed", len(loop[0]))  # another one for each loop: only the shared beginning may be known
    code, out, err = run("bench", "serve", "--url", f"{server.url}/v1", *SMALL, *loop, *options, *seed)
    found, counted = json.loads(out), metrics()
    assert (code, found["failures"], err.strip()) == (0, [], "")
    assert found["server"]["model"] == "tiny"
    assert found["load"]["exact_output"] is True
    assert found["load"]["calibrated_prompts"] is True
    assert found["requests"] == {"ok": 5, "failed": 0, "other_length": 0, "without_usage": 0}
    outside = found["outside"]
    assert outside["requests"] == 2 + 2
    assert found["tokens"]["output"] == 5 * 4
    assert outside["tokens"]["output"] == 2 * 1 + 2 * 4
    total = {name: count + outside["tokens"][name] for name, count in found["tokens"].items()}
    assert counted["request_success_total"] == 5 + outside["requests"]
    assert counted["request_prompt_tokens_sum"] == total["prompt"]
    assert counted["request_generation_tokens_sum"] == counted["generation_tokens_total"] == total["output"]
    assert counted["prefix_cache_hits_total"] == total["cached"]
    assert 256 <= found["tokens"]["cached"] / 5 <= 280  # whole blocks of the shared beginning
    assert counted["image_tokens_total"] == total["image"] > 0
    text = found["tokens"]["prompt"] - found["tokens"]["image"]
    assert text / 5 == pytest.approx(330, abs=8)  # around pictures stand blank lines
    _check_times(found)
    server.check_idle()


def _check_times(found):
    latencies = found["latencies"]
    for values in latencies.values():
        assert 0 < values["p50"] <= values["p90"] <= values["p99"]
    assert latencies["time_to_first_token"]["p99"] < latencies["latency"]["p99"] <= found["duration"]
    assert found["requests_per_second"] == pytest.approx(5 / found["duration"])
    assert found["output_tokens_per_second"] == pytest.approx(20 / found["duration"])


def test_bench_prints_a_table(run, server):
    code, out, err = run("bench", "serve", "--url", f"{server.url}/v1/", *SMALL, "--concurrency", 2, "--seed", 2)
    assert (code, err.strip()) == (0, "")
    assert re.search(r"answered +5 in \d+\.\d\d s, 0 failed", out)
    assert "tiny at http" in out
    for name in ("time to first token", "inter token latency", "time per output token", "latency"):
        assert re.search(rf"{name}( +│ +[\d.,]+){{4}}", out)


def test_bench_lists_failures_and_exits_1(run, server):
    code, out, err = run("bench", "serve", "--url", f"{server.url}/v1", *SMALL, "--images", 65, "--image-size", "2x2")
    assert code == 1
    assert re.search(r"5 +│ 400 +│ .*64 images", out)
    assert "0 in" in out
    assert "2 of the requests before the measured ones failed" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--rate", 2, "--concurrency", 3), "exclude each other"),
        (("--rate", 0), "rate must be above 0"),
        (("--image-size", "big"), "--image-size must be"),
        (("--prompt-tokens", 5, "--shared-prefix", 6), "shared_prefix 6"),
        (("--url", "localhost"), "--url must be"),
        (("--model", "other"), "404"),
        (("--url", "CLOSED"), "no server answers at"),
    ],
)
def test_bench_that_cannot_be_run_is_one_line_and_exit_code_2(run, server, arguments, part):
    with socket.socket() as closed:  # bound and not listening: nobody else can take the port
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        given = [address if argument == "CLOSED" else argument for argument in arguments]
        code, out, err = run("bench", "serve", "--url", f"{server.url}/v1", *given)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert part in lines[0]


# --- chat


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    file = tmp_path_factory.mktemp("photo") / "my cat.png"
    file.write_bytes(picture(0))
    return file


def user(text, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def talk(llm, *questions, effort="none", system=None):
    """The same conversation by the library: messages with all answers."""
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages.append(question)
        output = llm.chat(messages, PARAMS, ChatOptions(effort=effort))
        answer = {"role": "assistant", "content": output.text}
        messages.append(answer | ({"reasoning_content": output.reasoning} if output.reasoning else {}))
    return messages


def answers_of(messages):
    return "".join(f"{message['content']}\n" for message in messages if message["role"] == "assistant")


def test_chat_is_the_conversation_that_the_library_has(run, llm, model_folder, photo, tmp_path):
    saved = tmp_path / "talk.json"
    lines = [
        "what is this?",
        f"/image '{photo}' '{photo}'",
        "and these?",
        "/undo",
        "so?",
        f"/save {saved}",
        "/exit",
        "no",
    ]
    options = ("--max-tokens", 6, "--system", "Be brief.", "--image", photo, "--device", "cpu")
    code, out, err = run("chat", "--model", model_folder, *options, lines=lines)
    first = user("what is this?", photo)
    undone = talk(llm, first, user("and these?", photo, photo), system="Be brief.")
    kept = talk(llm, first, user("so?"), system="Be brief.")
    assert (code, out) == (0, answers_of(undone) + answers_of(kept[-1:]))
    assert "dropped the last turn, 1 left" in err
    expected = json.loads(json.dumps(kept, default=str))
    expected[3]["content"] = "so?"  # a question without pictures is plain text
    assert json.loads(saved.read_text(encoding="utf-8")) == expected


def test_chat_shows_reasoning_beside_the_answer_and_keeps_it(run, llm, model_folder, tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["/effort high", "why?", f"/save {saved}"]
    code, out, err = run("chat", "--model", model_folder, "--max-tokens", 6, lines=lines)
    messages = talk(llm, {"role": "user", "content": "why?"}, effort="high")
    assert messages[1]["reasoning_content"]
    assert (code, out) == (0, answers_of(messages))
    assert json.loads(saved.read_text(encoding="utf-8")) == messages
    assert "stopped after 6 tokens" in err


def test_chat_keeps_pictures_of_a_question_that_is_refused(run, llm, model_folder, photo):
    lines = [f"/image '{photo}'", "x" * 200_000, "/images", "short", "/images"]
    code, out, err = run("chat", "--model", model_folder, "--max-tokens", 6, lines=lines)
    assert (code, out) == (0, answers_of(talk(llm, user("short", photo))))
    assert re.search(r"error: \d+ prompt tokens .* max_model_len", err)
    assert err.count(str(photo)) == 2
    assert err.count("no pictures wait") == 1


def test_chat_refuses_a_picture_for_a_text_model_and_goes_on(run, text_folder, photo):
    lines = ["what?", "/clear", "hello"]
    code, out, err = run("chat", "--model", text_folder, "--max-tokens", 6, "--image", photo, lines=lines)
    assert code == 0
    assert "no vision" in err
    assert out.endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--effort", "huge"), "effort must be one of"),
        (("--image", "no.png"), "no picture at no.png"),
        (("--image", __file__), "not JPEG, PNG"),
        (("--max-tokens", 0), "max_tokens"),
        (("--temperature", -1), "temperature"),
        (("--model", "nowhere"), "no config.json"),
    ],
)
def test_chat_that_cannot_begin_is_one_line_and_exit_code_2(run, arguments, part):
    model = () if "--model" in arguments else ("--model", "never-loaded")
    code, out, err = run("chat", *model, *arguments, lines=["hello"])
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert part in lines[0]
