"""From generated ids to text: reasoning and answer, ends, deltas that add up; no torch."""

import numpy as np
import pytest

from deepspan.core.request import OutputForm, Request
from deepspan.core.sampling import SamplingParams
from deepspan.engine.outputs import OutputCollector
from deepspan.text import special
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer(folder, vision=True)


CHAT_FORM = OutputForm(is_chat=True, tools={"f": {"type": "object"}})


def _run(tokenizer, prompt, generated, form=CHAT_FORM, **params):
    """Collect `generated` (text with special strings) after `prompt`; the events and the output."""
    ids = np.array(tokenizer.encode_raw(prompt), dtype=np.int64)
    kinds = np.full(len(ids), -1, dtype=np.int8)
    params = SamplingParams(**params)
    request = Request(token_ids=ids, kinds=kinds, spans=(), images=(), params=params, form=form)
    collector = OutputCollector(0, request, tokenizer)
    events = []
    for token_id in tokenizer.encode_raw(generated):
        if not collector.is_finished:
            events.append(collector.push(token_id))
    return events, collector.output()


CHAT = special.USER + "q" + special.ASSISTANT + special.THINK_CLOSE
THINK = special.USER + "q" + special.ASSISTANT + special.THINK_OPEN
CASES = [  # prompt, generated, text, reasoning
    (CHAT, "yes" + special.EOS, "yes", ""),
    (CHAT, special.EOS, "", ""),
    (CHAT, "dé☃" + special.EOS, "dé☃", ""),
    (THINK, "hm" + special.THINK_CLOSE + "yes" + special.EOS, "yes", "hm"),
    (THINK, special.THINK_CLOSE + "yes" + special.EOS, "yes", ""),
    (THINK, "hm☃" + special.THINK_CLOSE + "☃" + special.EOS, "☃", "hm☃"),
    (THINK, "hm" + special.EOS, "", "hm"),
    (THINK, "hm" + special.THINK_CLOSE + special.EOS, "", "hm"),
    ("q", "a" + special.PAD + "b" + special.EOS, "ab", ""),
]


@pytest.mark.parametrize(("prompt", "generated", "text", "reasoning"), CASES)
def test_output_that_stops_is_split_and_complete(tokenizer, prompt, generated, text, reasoning):
    _, output = _run(tokenizer, prompt, generated)
    assert (output.text, output.reasoning, output.finish_reason) == (text, reasoning, "stop")
    assert output.token_ids == tuple(tokenizer.encode_raw(generated))
    assert output.num_prompt_tokens == len(tokenizer.encode_raw(prompt))
    assert output.num_image_tokens == 0


@pytest.mark.parametrize(("prompt", "generated", "text", "reasoning"), CASES)
def test_events_add_up_to_the_output_and_end_once(tokenizer, prompt, generated, text, reasoning):
    events, output = _run(tokenizer, prompt, generated)
    assert "".join(event.text for event in events) == text
    assert "".join(event.reasoning for event in events) == reasoning
    assert [event.token_id for event in events] == list(output.token_ids)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_output_at_its_limit_ends_by_length(tokenizer):
    events, output = _run(tokenizer, CHAT, "abc", max_tokens=3)
    assert (output.text, output.finish_reason) == ("abc", "length")
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_output_at_its_limit_shows_a_broken_character(tokenizer):
    snowman = tokenizer.encode_raw("☃")
    assert len(snowman) == 3
    request = Request(
        token_ids=np.array([97]),
        kinds=np.array([-1], dtype=np.int8),
        spans=(),
        images=(),
        params=SamplingParams(max_tokens=2),
    )
    collector = OutputCollector(4, request, tokenizer)
    first, last = (collector.push(token_id) for token_id in snowman[:2])
    assert (first.text, last.text, first.request) == ("", "\ufffd", 4)


def test_output_whose_last_token_is_the_end_stops_rather_than_runs_out(tokenizer):
    _, output = _run(tokenizer, CHAT, "ab" + special.EOS, max_tokens=3)
    assert output.finish_reason == "stop"


def test_output_that_ignores_the_end_goes_on_and_hides_it(tokenizer):
    _, output = _run(tokenizer, CHAT, "a" + special.EOS + "b", max_tokens=3, ignore_eos=True)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "length", 3)


# --- stop strings, stop tokens, ends without a token


def test_stop_string_ends_the_answer_and_is_not_in_it(tokenizer):
    events, output = _run(tokenizer, CHAT, "one; two", stop=["; t", "zzz"])
    assert (output.text, output.finish_reason, output.stop) == ("one", "stop", "; t")
    assert "".join(event.text for event in events) == "one"


def test_stop_string_in_reasoning_ends_it_and_does_not_reach_over_its_end(tokenizer):
    _, output = _run(tokenizer, THINK, "a;b" + special.THINK_CLOSE + "c;d", stop=[";"])
    assert (output.reasoning, output.text, output.stop) == ("a", "", ";")
    _, output = _run(tokenizer, THINK, "a;" + special.THINK_CLOSE + "b" + special.EOS, stop=[";b"])
    assert (output.reasoning, output.text, output.stop) == ("a;", "b", None)


def test_stop_string_is_kept_where_it_is_asked_for(tokenizer):
    _, output = _run(tokenizer, CHAT, "one; two", stop=["; t"], include_stop_str_in_output=True)
    assert (output.text, output.stop) == ("one; t", "; t")


def test_text_held_for_a_stop_string_comes_out_at_the_end(tokenizer):
    _, output = _run(tokenizer, CHAT, "abEN" + special.EOS, stop=["END"])
    assert (output.text, output.stop) == ("abEN", None)


def test_stop_token_ends_the_answer(tokenizer):
    (dot,) = tokenizer.encode_raw(".")
    _, output = _run(tokenizer, CHAT, "ab.", stop_token_ids=[dot])
    assert (output.finish_reason, output.stop) == ("stop", dot)


def test_end_without_a_token_is_terminal_and_gives_out_what_was_held(tokenizer):
    ids = np.array(tokenizer.encode_raw(CHAT), dtype=np.int64)
    request = Request(
        token_ids=ids, kinds=np.full(len(ids), -1, dtype=np.int8), spans=(), images=(),
        params=SamplingParams(stop=["END"]),
    )  # fmt: skip
    collector = OutputCollector(0, request, tokenizer)
    for token_id in tokenizer.encode_raw("abE"):
        collector.push(token_id)
    event = collector.end("error", "no memory")
    assert (event.text, event.token_id, event.finish_reason, event.error) == ("E", None, "error", "no memory")
    assert collector.output().text == "abE"
    with pytest.raises(AssertionError, match="ends once"):
        collector.end("abort")


# --- calls of tools, and raw prompts

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="x" string="true">a;b</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def _calls(events):
    pieces = [piece for event in events for piece in event.calls]
    return [piece.name for piece in pieces if piece.name], "".join(piece.arguments for piece in pieces)


def test_call_comes_out_as_a_call_and_stop_strings_leave_it_alone(tokenizer):
    events, output = _run(tokenizer, THINK, f"R{special.THINK_CLOSE}I look.{CALL}{special.EOS}", stop=[";"])
    assert (output.reasoning, output.text, output.finish_reason) == ("R", "I look.", "stop")
    assert [(call.name, call.arguments, call.is_complete) for call in output.calls] == [("f", '{"x": "a;b"}', True)]
    assert _calls(events) == (["f"], '{"x": "a;b"}')
    assert output.num_reasoning_tokens == 2
    assert [event.is_reasoning for event in events][:3] == [True, True, False]


def test_call_cut_off_by_a_limit_stays_open_and_by_the_end_is_none(tokenizer):
    cut = CALL.split(";b", maxsplit=1)[0]
    _, output = _run(tokenizer, CHAT, cut, max_tokens=len(tokenizer.encode_raw(cut)))
    assert [(call.arguments, call.is_complete) for call in output.calls] == [('{"x": "a', False)]
    _, output = _run(tokenizer, CHAT, cut + special.EOS)
    assert (output.calls, output.text) == ((), "")


def test_markup_without_tools_and_in_raw_prompts_is_text(tokenizer):
    _, output = _run(tokenizer, CHAT, CALL + special.EOS, form=OutputForm(is_chat=True))
    assert (output.text, output.calls) == (CALL.lstrip("\n"), ())
    text = f"a{special.THINK_CLOSE}b{CALL}"
    _, output = _run(tokenizer, THINK, text + special.EOS, form=OutputForm(is_chat=False))
    assert (output.text, output.reasoning, output.calls) == (text, "", ())
    _, output = _run(tokenizer, "q", "a" + special.EOS, form=OutputForm(is_chat=False), skip_special_tokens=False)
    assert output.text == "a" + special.EOS


@pytest.mark.parametrize("token", [special.USER, special.ASSISTANT])
def test_turn_of_somebody_else_ends_the_answer(tokenizer, token):
    _, output = _run(tokenizer, CHAT, "yes" + token + "more")
    assert (output.text, output.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("prompt", "generated", "reasoning", "text"),
    [
        (THINK + "so", "\nfar" + special.THINK_CLOSE + "\nyes", "\nfar", "yes"),
        (CHAT + "def f():", "\n  pass", "", "\n  pass"),
        (THINK + "R" + special.THINK_CLOSE + "A", " and B", "", " and B"),
        (CHAT, "\n\nyes", "", "yes"),
        (CHAT + "a" + special.EOS + special.USER + "q" + special.THINK_OPEN, "b", "", "b"),
    ],
)
def test_output_starts_where_the_prompt_ends(tokenizer, prompt, generated, reasoning, text):
    _, output = _run(tokenizer, prompt, generated + special.EOS)
    assert (output.reasoning, output.text) == (reasoning, text)


def test_call_that_the_prompt_opens_is_read_from_its_middle(tokenizer):
    opened, body = CALL.split("\n<｜DSML｜invoke")
    _, output = _run(tokenizer, CHAT + opened + "\n", "<｜DSML｜invoke" + body + special.EOS)
    assert ([call.arguments for call in output.calls], output.text) == (['{"x": "a;b"}'], "")
