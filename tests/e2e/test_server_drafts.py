"""The API with drafts on: every answer, whole and streamed, is what it is with drafts off, inside accepted runs too."""

import json
import re
import sys

import httpx
import pytest
from draft_helpers import Told
from server_helpers import NAME, image_part, picture, serving

from deepspan.cli.main import main
from deepspan.config.engine import EngineConfig
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny

N = 5
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
PICTURE = [{"role": "user", "content": [image_part(picture(1)), {"type": "text", "text": "what?"}]}]
CASES = {
    "text": {},
    "picture": {"messages": PICTURE},
    "thinking": {"reasoning_effort": "high"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "json": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": r"[A-F]{4}-\d{9,12}"}},
    "choice": {"structured_outputs": {"choice": ["a rather long answer", "another long answer"]}},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "one tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "limit": {"max_tokens": 9},
    "limit inside a run": {"max_tokens": 10},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs of a schema": {
        "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "min_p": {"min_p": 0.3},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def told():
    return Told()


@pytest.fixture(scope="module")
def plain(draft_folder, told):
    with serving(draft_folder) as running:
        told.watch(running.service.llm.llm)
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def drafting(draft_folder, told):
    engine = EngineConfig(draft_method="dspark", num_drafts=N)
    with serving(draft_folder, llm_options={"engine": engine}) as running:
        told.guess_for(running.service.llm.llm)
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def mtp(draft_folder, told, tmp_path_factory):
    """The same network with a stage of plain MTP: a tensor's values depend on its name and the seed alone."""
    fields = json.loads((draft_folder / "config.json").read_text())
    overrides = {name: value for name, value in fields.items() if name.startswith("vision_") or name == "vocab_size"}
    out = tmp_path_factory.mktemp("tiny") / "mtp"
    write_tiny(out, ratios=(0, 4, 16, 4), seed=3, draft_stages=1, draft_kind=DraftKind.MTP, overrides=overrides)
    with serving(out, llm_options={"engine": EngineConfig(draft_method="mtp", num_drafts=3)}) as running:
        told.guess_for(running.service.llm.llm)
        yield running
        running.check_idle()


def post(server, **fields):
    body = {"model": NAME, "max_tokens": 30, "ignore_eos": True, "messages": [{"role": "user", "content": "one two"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def whole(server, **fields):
    """(everything of the answer but ids and times, log-probabilities of its tokens)"""
    answer = post(server, **fields).json()
    choice = answer["choices"][0]
    logprobs = [
        [(entry["token"], entry["logprob"]), *((top["token"], top["logprob"]) for top in entry["top_logprobs"])]
        for entry in (choice.get("logprobs") or {}).get("content") or []
    ]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    message = {name: choice["message"].get(name) for name in ("content", "reasoning_content")}
    return (message, calls, choice["finish_reason"], answer["usage"]["completion_tokens"]), logprobs


def streamed(server, **fields):
    """The same, put together from the pieces of a stream."""
    text = post(server, stream=True, stream_options={"include_usage": True}, **fields).text
    message, calls, logprobs, reason, count = {"content": "", "reasoning_content": ""}, [], [], None, None
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        count = (chunk.get("usage") or {}).get("completion_tokens", count)
        for choice in chunk["choices"]:
            for name in message:
                message[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == len(calls):
                    calls.append({"name": "", "arguments": ""})
                for name, value in call["function"].items():
                    calls[call["index"]][name] += value or ""
            logprobs += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or []]
            reason = choice["finish_reason"] or reason
    return (message, calls, reason, count), logprobs


def check_same(plain, drafting, **fields):
    expected, expected_logprobs = whole(plain, **fields)
    before = drafting.stats
    found, logprobs = whole(drafting, **fields)
    after = drafting.stats
    assert found == expected
    assert [[token for token, _ in entry] for entry in logprobs] == [
        [token for token, _ in entry] for entry in expected_logprobs
    ]
    flat = [value for entry in logprobs for _, value in entry]
    assert flat == pytest.approx([value for entry in expected_logprobs for _, value in entry], abs=1e-4)
    assert after.num_accepted_tokens > before.num_accepted_tokens
    in_pieces, tokens = streamed(drafting, **fields)
    assert (in_pieces, tokens) == streamed(plain, **fields)
    for name, value in expected[0].items():
        assert in_pieces[0][name] == (value or "")
    assert in_pieces[1:] == expected[1:]
    assert len(tokens) == len(logprobs)
    return expected, logprobs


@pytest.mark.parametrize("case", CASES)
def test_answer_is_the_same_with_drafts(plain, drafting, case):
    check_same(plain, drafting, **CASES[case])


@pytest.mark.parametrize("case", ["picture", "thinking", "schema", "tools", "logprobs", "limit inside a run"])
def test_answer_is_the_same_with_plain_mtp(plain, mtp, case):
    check_same(plain, mtp, **CASES[case])


def test_every_token_of_an_accepted_run_has_its_logprobs(plain, drafting):
    (_, _, _, count), logprobs = check_same(plain, drafting, logprobs=True, top_logprobs=2)
    assert len(logprobs) == count == 30


@pytest.mark.parametrize("start", [4, 6, 7, 9])
def test_stop_string_inside_an_accepted_run_ends_the_answer_there(plain, drafting, start):
    """Wherever it begins, in the middle of what is accepted in one step or at its edge."""
    full = whole(plain)[0][0]["content"]
    stop = full[start : start + 3]
    assert len(stop) == 3
    for extra in ({}, {"include_stop_str_in_output": True}):
        (message, _, reason, _), _ = check_same(plain, drafting, stop=[stop], **extra)
        assert reason == "stop"
        assert (message["content"] or "") == full[: full.index(stop) + (3 if extra else 0)]


@pytest.mark.parametrize("limit", [2, 3, 7, 8, 9, 12])
def test_limit_cuts_an_accepted_run_exactly(plain, drafting, limit):
    """The last token is never guessed, so an answer of two tokens has nothing to accept."""
    fields = {"max_tokens": limit, "logprobs": True}
    if limit == 2:
        assert whole(plain, **fields)[0] == whole(drafting, **fields)[0]
        return
    (_, _, reason, count), logprobs = check_same(plain, drafting, **fields)
    assert (reason, count, len(logprobs)) == ("length", limit, limit)


def test_bad_words_bias_and_stop_tokens_hold_inside_a_run(plain, drafting):
    full = whole(plain)[0][0]["content"]
    ids = httpx.post(f"{plain.url}/tokenize", json={"prompt": full}).json()["tokens"]
    words = [word for word in re.findall(r"\w+", full) if len(word) > 1]
    bad = words[len(words) // 2]
    (message, *_), _ = check_same(plain, drafting, bad_words=[bad])
    assert bad in full
    assert message["content"] != full
    check_same(plain, drafting, logit_bias={str(ids[6]): -100, str(ids[9]): 5})
    (_, _, reason, count), _ = check_same(plain, drafting, stop_token_ids=[ids[7]])
    assert reason == "stop"
    assert count <= 8


def test_requests_at_once_are_each_what_they_are_alone(plain, drafting):
    from concurrent.futures import ThreadPoolExecutor

    names = [name for name in CASES if name != "logprobs"]
    alone = [whole(plain, **CASES[name])[0] for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: whole(drafting, **CASES[name])[0], names))
    for name, expected, found in zip(names, alone, together, strict=True):
        assert found == expected, name


# --- counters


def counters(server):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = re.findall(r'^vllm:spec_decode_(\w+)_total\{[^}]*?(?:position="(\d+)")?\} (\S+)$', "\n".join(lines), re.M)
    return {(name, position): float(value) for name, position, value in found}


def grown(server, act):
    before = counters(server)
    act()
    after = counters(server)
    return {key: after[key] - before[key] for key in after}


def by_position(found):
    return [found["num_accepted_tokens_per_pos", str(position)] for position in range(N)]


def test_counters_of_right_guesses_are_exact(plain, drafting, told, monkeypatch):
    """13 tokens: one of the prompt, then two steps of five guesses and one token more."""
    whole(plain, max_tokens=13)
    monkeypatch.setattr(told, "wrong_at", 0)
    found = grown(drafting, lambda: whole(drafting, max_tokens=13))
    assert (found["num_drafts", ""], found["num_draft_tokens", ""], found["num_accepted_tokens", ""]) == (2, 10, 10)
    assert by_position(found) == [2] * N


def test_counters_by_position_are_of_whole_prefixes(plain, drafting):
    """Tokens 4, 8 and so on are guessed wrong. First comes token 1, behind it 1 to 5 are guessed: two are taken."""
    whole(plain, max_tokens=13)
    found = grown(drafting, lambda: whole(drafting, max_tokens=13))
    assert found["num_drafts", ""] == 3
    assert found["num_accepted_tokens", ""] == sum(by_position(found)) == 2 + 3 + 3
    assert by_position(found) == [3, 3, 2, 0, 0]
    assert found["num_draft_tokens", ""] == 5 + 5 + 4


def test_guesses_that_a_grammar_does_not_allow_count_as_none(plain, drafting, told, monkeypatch):
    fields = {"structured_outputs": {"choice": ["abcdefgh"]}, "ignore_eos": False}
    (_, _, _, count), _ = whole(plain, **fields)
    assert count >= 8
    monkeypatch.setattr(told, "wrong_at", 3)
    found = grown(drafting, lambda: whole(drafting, **fields))
    assert found["num_accepted_tokens", ""] == found["num_draft_tokens", ""] == sum(by_position(found)) > 0
    assert found["num_drafts", ""] > 1


def test_server_that_does_not_draft_has_no_such_counters(plain):
    assert counters(plain) == {}


def test_bench_tells_how_guesses_were_taken(drafting, monkeypatch, capsys):
    options = "--requests 2 --concurrency 1 --prompt-tokens 20 --output-tokens 6 --warmup 0 --json".split()
    monkeypatch.setattr(sys, "argv", ["deepspan", "bench", "serve", "--url", f"{drafting.url}/v1", *options])
    monkeypatch.delattr(drafting.service.llm.llm._runner._drafting, "propose")  # its own stages again
    before = drafting.stats
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    found = json.loads(capsys.readouterr().out)["drafts"]
    assert found["steps"] == drafting.stats.num_drafts - before.num_drafts > 0
    assert found["draft_tokens"] == drafting.stats.num_draft_tokens - before.num_draft_tokens
    assert len(found["rate_per_position"]) == N
