"""The conversation of `deepspan chat`, with a model that says what it is told to: no network, no terminal."""

import json
import signal

import numpy as np
import pytest
from PIL import Image

from deepspan.cli.chat import Commands, Session, talk
from deepspan.core.output import TokenEvent
from deepspan.core.sampling import SamplingParams
from deepspan.errors import DeepspanError, ImageError, InputError

PARAMS = SamplingParams(max_tokens=9, temperature=0.5, seed=3)


def event(text="", *, reasoning="", finish=None, error=None):
    return TokenEvent(request=0, token_id=1, text=text, reasoning=reasoning, finish_reason=finish, error=error)


def answer(*texts, reasoning=(), finish="stop"):
    return [*(event(reasoning=piece) for piece in reasoning), *map(event, texts), event(finish=finish)]


class FakeModel:
    """Answers with the scripts in turn. A script is a list of events and exceptions, or one exception to refuse."""

    def __init__(self, *scripts):
        self.scripts, self.asked, self.closed = list(scripts), [], 0

    def stream_chat(self, messages, params=None, options=None):
        self.asked.append((messages, params, options))
        script = self.scripts.pop(0)
        if isinstance(script, BaseException):
            raise script
        return self._stream(script)

    def _stream(self, script):
        try:
            for item in script:
                if isinstance(item, BaseException):
                    raise item
                if callable(item):
                    item()
                else:
                    yield item
        finally:
            self.closed += 1

    @property
    def messages(self):
        return self.asked[-1][0]


@pytest.fixture
def pictures(tmp_path):
    paths = [tmp_path / "a b.png", tmp_path / "c.png"]
    for seed, path in enumerate(paths):
        Image.fromarray(np.full((4, 5, 3), seed, dtype=np.uint8)).save(path)
    return paths


def session_of(*scripts, effort="none", system=""):
    model = FakeModel(*scripts)
    return Session(model, PARAMS, effort=effort, system=system), model


def ask(session, question, stopped=lambda: False):
    shown = []
    return session.ask(question, shown.append, stopped), "".join(one.text for one in shown)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


# --- turns


def test_history_grows_by_whole_turns_and_keeps_reasoning():
    session, model = session_of(answer("He", "llo", reasoning=("h", "m")), answer("Bye", finish="length"))
    assert ask(session, "hi") == ("stop", "Hello")
    assert ask(session, "and?") == ("length", "Bye")
    first = [user("hi"), assistant("Hello", reasoning_content="hm")]
    assert model.asked[0][0] == [user("hi")]
    assert model.messages == [*first, user("and?")]
    assert session.transcript() == [*first, user("and?"), assistant("Bye")]
    assert model.closed == 2


def test_settings_reach_the_model_and_may_change_between_questions():
    session, model = session_of(answer("a"), answer("b"), effort="low", system="Be brief.")
    ask(session, "one")
    commands = Commands(session)
    commands.run("/effort max")
    commands.run("/system")
    ask(session, "two")
    (messages, params, options), (later, _, later_options) = model.asked
    assert messages == [{"role": "system", "content": "Be brief."}, user("one")]
    assert (params, options.effort, later_options.effort) == (PARAMS, "low", "max")
    assert later == [user("one"), assistant("a"), user("two")]


def test_pictures_go_with_one_question_in_order_and_are_read_once(pictures):
    session, model = session_of(answer("a"), answer("b"))
    session.attach(pictures)
    contents = [path.read_bytes() for path in pictures]
    pictures[0].unlink()
    ask(session, "what?")
    ask(session, "sure?")
    images = [{"type": "image", "image": data} for data in contents]
    assert model.messages[0] == user([*images, {"type": "text", "text": "what?"}])
    assert model.messages[2] == user("sure?")


def test_refused_question_changes_nothing_and_can_be_asked_again(pictures):
    session, model = session_of(answer("a"), InputError("too long"), answer("b"))
    ask(session, "one")
    before = session.transcript()
    session.attach(pictures[:1])
    with pytest.raises(InputError, match="too long"):
        ask(session, "two")
    assert (session.transcript(), session.unasked) == (before, "two")
    assert [picture.path for picture in session.waiting] == pictures[:1]
    ask(session, session.unasked)
    assert len(model.messages[-1]["content"]) == 2
    assert (session.waiting, session.unasked) == ([], "")


def test_answer_that_fails_midway_leaves_no_half_turn(pictures):
    session, model = session_of([event("par"), event(finish="error", error="broken")], answer("b"))
    session.attach(pictures)
    with pytest.raises(DeepspanError, match="broken"):
        ask(session, "one")
    assert (session.transcript(), len(session.waiting), model.closed) == ([], 2, 1)


@pytest.mark.parametrize("way", ["flag", "exception"])
def test_interrupted_answer_is_aborted_and_what_came_is_kept(way, pictures):
    script = [event(reasoning="r"), event("half"), *([KeyboardInterrupt()] if way == "exception" else answer(" more"))]
    session, model = session_of(script, answer("b"))
    session.attach(pictures)
    came = []
    ending = session.ask("one", came.append, lambda: way == "flag" and len(came) == 2)
    assert (ending, model.closed) == ("interrupted", 1)
    assert session.transcript()[1] == assistant("half", reasoning_content="r")
    assert session.waiting == []
    ask(session, "two")
    assert model.messages[1] == assistant("half", reasoning_content="r")


@pytest.mark.parametrize("script", [KeyboardInterrupt(), [KeyboardInterrupt()]])
def test_question_interrupted_before_anything_came_counts_as_not_asked(script, pictures):
    session, _ = session_of(script)
    session.attach(pictures)
    assert ask(session, "one") == ("interrupted", "")
    assert (session.turns, len(session.waiting), session.unasked) == ([], 2, "one")


def test_answer_that_ends_with_its_last_token_is_not_called_interrupted():
    session, _ = session_of([event("all", finish="stop")])
    assert ask(session, "one", stopped=lambda: True) == ("stop", "all")


# --- commands


def test_image_command_takes_quoted_paths_and_lists_what_waits(pictures):
    session, _ = session_of()
    commands = Commands(session)
    assert commands.run("/images") == "no pictures wait"
    said = commands.run(f"/image '{pictures[0]}' {pictures[1]}")
    assert said == commands.run("/images")
    assert [str(path) in said for path in pictures] == [True, True]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text.png", "not JPEG"),
        ("cut.png", "truncated"),
        ("long.png", "more than 33554432 bytes"),
        ("missing.png", "no picture"),
        (".", "no picture"),
        ("n" * 300, "cannot be read: File name too long"),
    ],
)
def test_image_that_is_none_is_refused_by_name_and_none_is_attached(pictures, tmp_path, name, reason):
    session, _ = session_of()
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "cut.png").write_bytes(pictures[1].read_bytes()[:50])
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(2**25 + 9)
    with pytest.raises(ImageError, match=reason) as caught:
        Commands(session).run(f"/image {pictures[1]} {tmp_path / name}")
    assert str(tmp_path / name) in str(caught.value)
    assert session.waiting == []


def test_clear_and_undo(pictures):
    session, model = session_of(answer("a"), answer("b"), answer("c"), system="S")
    commands = Commands(session)
    ask(session, "one")
    ask(session, "two")
    assert "1 left" in commands.run("/undo")
    ask(session, "three")
    assert model.messages[1:] == [user("one"), assistant("a"), user("three")]
    session.attach(pictures)
    commands.run("/clear")
    assert (session.transcript(), session.waiting) == ([{"role": "system", "content": "S"}], [])
    with pytest.raises(InputError, match="no turn"):
        commands.run("/undo")


def test_save_writes_messages_with_paths(pictures, tmp_path):
    session, _ = session_of(answer("é", reasoning=("r",)), system="S")
    session.attach(pictures)
    ask(session, "what?")
    file = tmp_path / "my talk.json"
    assert "3 messages" in Commands(session).run(f"/save {file}")
    images = [{"type": "image", "image": str(path)} for path in pictures]
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "S"},
        user([*images, {"type": "text", "text": "what?"}]),
        assistant("é", reasoning_content="r"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/nonsense", "no command /nonsense"),
        ("/", "no command /"),
        ("/image", "needs the path"),
        ("/image 'a", "quotation"),
        ("/effort", "one of none, low, high, max"),
        ("/effort huge", "found 'huge'"),
        ("/save", "needs the name"),
        ("/save /no/such/folder/x", "cannot be written: No such file"),
    ],
)
def test_command_that_cannot_be_carried_out_says_why(line, reason):
    session, _ = session_of()
    with pytest.raises(InputError, match=reason):
        Commands(session).run(line)
    assert session.effort == "none"


def test_help_names_every_command():
    session, _ = session_of()
    said = Commands(session).run("/help")
    names = ["/image PATH...", "/images", "/clear", "/undo", "/effort LEVEL", "/system TEXT", "/save FILE", "/exit"]
    assert [name for name in names if name not in said] == []


# --- the loop


def press():
    signal.raise_signal(signal.SIGINT)


def talk_over(session, *lines):
    """Lines, or exceptions to raise, as a terminal would give them; then the end of the input."""
    waiting = list(lines)

    def read():
        item = waiting.pop(0) if waiting else EOFError()
        if isinstance(item, BaseException):
            raise item
        return item

    talk(session, read)
    return waiting


def test_only_answers_go_to_stdout(capsys):
    session, _ = session_of(answer("[b]Yes", " ", "so", reasoning=("why ", "not")), answer("No", finish="length"))
    talk_over(session, "one", "", "  ", "/effort low", "/nonsense", "two")
    out, err = capsys.readouterr()
    assert out == "[b]Yes so\nNo\n"
    assert "why not\neffort is low\n" in err
    assert "no command /nonsense" in err
    assert "stopped after 9 tokens" in err


def test_refused_question_prints_the_reason_and_the_loop_goes_on(capsys):
    session, _ = session_of(InputError("messages[0]: [no]"), answer("fine"))
    talk_over(session, "one", "two")
    out, err = capsys.readouterr()
    assert (out, err) == ("fine\n", "error: messages[0]: [no]\n")


def test_answer_that_breaks_midway_ends_its_line(capsys):
    session, _ = session_of([event("par"), event(finish="error", error="broken")], answer("b"))
    talk_over(session, "one", "two")
    assert capsys.readouterr().out == "par\nb\n"


@pytest.mark.parametrize("last", ["/exit", EOFError(), KeyboardInterrupt()])
def test_ways_to_leave(last):
    session, model = session_of(answer("a"))
    assert talk_over(session, "one", last, "two") == ["two"]
    assert len(model.asked) == 1


def test_ctrl_c_while_answering_stops_the_answer_at_its_next_token_and_not_the_loop(capsys):
    before = signal.getsignal(signal.SIGINT)
    session, model = session_of([event("one "), press, event("two "), event("three")], answer("next"))
    talk_over(session, "a", "b")
    out, err = capsys.readouterr()
    assert out == "one two \nnext\n"
    assert "[interrupted]" in err
    assert model.messages == [user("a"), assistant("one two "), user("b")]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_does_not_wait_for_a_token(capsys):
    session, _ = session_of([press, press, event("never")], answer("next"))
    talk_over(session, "a", "b")
    out, err = capsys.readouterr()
    assert out == "next\n"
    assert "before anything came" in err


def test_input_that_is_no_text_is_refused():
    session, _ = session_of()
    with pytest.raises(InputError, match="no utf-8 text"):
        talk_over(session, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"))
