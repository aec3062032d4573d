"""`deepspan chat`: a conversation with a local model in the terminal.

Owns what a conversation remembers (`Session`), the commands that begin with a slash (`Commands`), and the loop that
reads lines. Invariants: a turn is in the history whole (question, pictures, all that came of the answer) or not at all,
and a question that is refused leaves its pictures waiting; a picture is read when it is attached, so that a file that
changes later changes nothing; answers go to stdout and nothing else does. Called by `cli.main`.
"""

import json
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, cast, get_args

from deepspan.cli.options import DraftOptions
from deepspan.cli.progress import notes
from deepspan.config.engine import EngineConfig
from deepspan.core.output import FinishReason, TokenEvent
from deepspan.core.sampling import SamplingParams
from deepspan.errors import DeepspanError, ImageError, InputError
from deepspan.image.decode import DEFAULT_LIMITS, decode_image
from deepspan.text.switches import ChatOptions, Effort

PROMPT = "> "
Ending = FinishReason | Literal["interrupted"]


class AnswerStream(Protocol):
    """Events of one answer; closing it aborts the answer."""

    def __iter__(self) -> Iterator[TokenEvent]: ...

    def close(self) -> None: ...


class ChatModel(Protocol):
    """What a session needs of a model: `LLM`, or a stand-in for tests."""

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> AnswerStream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """path: as it was given. data: contents of the file when it was attached."""

    path: Path
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and what came of its answer."""

    question: str
    pictures: tuple[Picture, ...]
    reasoning: str
    answer: str


class Session:
    """One conversation: its turns, its settings, and the pictures that wait for the next question."""

    def __init__(self, model: ChatModel, params: SamplingParams, *, effort: Effort, system: str) -> None:
        self._model, self.params = model, params
        self.effort, self.system = effort, system
        self.turns: list[Turn] = []
        self.waiting: list[Picture] = []
        self.unasked = ""  # the last question, if it could not be served

    def ask(self, question: str, show: Callable[[TokenEvent], None], stopped: Callable[[], bool]) -> Ending:
        """Answer a question about the pictures that wait; `show` gets every event.

        stopped: asked after every token; true ends the answer, as a KeyboardInterrupt does. What came by then is kept;
        if nothing came, the question counts as not asked.
        Raises DeepspanError if the question cannot be served; turns and pictures are then what they were.
        """
        self.unasked = question
        turn = Turn(question=question, pictures=tuple(self.waiting), reasoning="", answer="")
        messages = [*self._messages(_bytes_part), _user_message(turn, _bytes_part)]
        reasoning = answer = ""
        ending: Ending = "interrupted"
        try:
            stream = self._model.stream_chat(messages, self.params, ChatOptions(effort=self.effort))
        except KeyboardInterrupt:
            return ending
        try:
            for event in stream:
                if event.finish_reason == "error":
                    raise DeepspanError(f"the answer failed: {event.error}")
                reasoning, answer = reasoning + event.reasoning, answer + event.text
                show(event)
                if event.finish_reason is not None:
                    ending = event.finish_reason
                elif stopped():
                    break
        except KeyboardInterrupt:
            pass
        finally:
            stream.close()
        if reasoning or answer or ending != "interrupted":
            self.turns.append(Turn(question=question, pictures=turn.pictures, reasoning=reasoning, answer=answer))
            self.waiting, self.unasked = [], ""
        return ending

    def attach(self, paths: Sequence[Path]) -> None:
        """Pictures for the next question. Raises ImageError for the first that is none; then none is attached."""
        self.waiting += [read_picture(path) for path in paths]

    def clear(self) -> None:
        """Forget turns and pictures; settings stay."""
        self.turns, self.waiting, self.unasked = [], [], ""

    def undo(self) -> None:
        """Drop the last turn. Raises InputError if there is none."""
        if not self.turns:
            raise InputError("there is no turn to undo")
        self.turns.pop()

    def transcript(self) -> list[dict[str, Any]]:
        """The conversation as messages that JSON can hold: images are paths."""
        return self._messages(_path_part)

    def _messages(self, part: Callable[[Picture], Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            answer = {"role": "assistant", "content": turn.answer}
            if turn.reasoning:
                answer["reasoning_content"] = turn.reasoning
            messages += [_user_message(turn, part), answer]
        return messages


class Commands:
    """Lines that begin with a slash, carried out on a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._table: dict[str, tuple[Callable[[str], str], str, str]] = {
            "image": (self._image, "PATH...", "attach pictures to the next question"),
            "images": (self._images, "", "list the pictures that wait for a question"),
            "clear": (self._clear, "", "forget the conversation and the pictures that wait"),
            "undo": (self._undo, "", "drop the last question and its answer"),
            "effort": (self._effort, "LEVEL", f"think this much: {', '.join(get_args(Effort))}"),
            "system": (self._system, "TEXT", "set the system message; none if there is no text"),
            "save": (self._save, "FILE", "write the conversation as JSON messages"),
            "help": (self._help, "", "show this"),
            "exit": (self._exit, "", "leave, as Ctrl-D does"),
        }

    def run(self, line: str) -> str:
        """Carry a command out; what there is to say about it. Raises InputError, or EOFError where one leaves."""
        name, _, rest = line.removeprefix("/").partition(" ")
        if name not in self._table:
            raise InputError(f"there is no command /{name}; /help lists them")
        return self._table[name][0](rest.strip())

    def _image(self, rest: str) -> str:
        try:
            paths = [Path(word) for word in shlex.split(rest)]
        except ValueError as error:  # a quote that is not closed
            raise InputError(f"/image: {error}") from error
        if not paths:
            raise InputError("/image needs the path of a picture")
        self._session.attach(paths)
        return self._images("")

    def _images(self, _: str) -> str:
        waiting = self._session.waiting
        if not waiting:
            return "no pictures wait"
        return "\n".join(["waiting for the next question:", *(f"  {picture.path}" for picture in waiting)])

    def _clear(self, _: str) -> str:
        self._session.clear()
        return "the conversation is forgotten"

    def _undo(self, _: str) -> str:
        self._session.undo()
        return f"dropped the last turn, {len(self._session.turns)} left"

    def _effort(self, rest: str) -> str:
        self._session.effort = read_effort(rest)
        return f"effort is {rest}"

    def _system(self, rest: str) -> str:
        self._session.system = rest
        return "the system message is set" if rest else "there is no system message"

    def _save(self, rest: str) -> str:
        if not rest:
            raise InputError("/save needs the name of a file")
        messages = self._session.transcript()
        file = Path(rest)
        try:
            file.expanduser().write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:  # expanduser of an unknown user is a RuntimeError
            raise InputError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from error
        return f"wrote {len(messages)} messages to {file}"

    def _help(self, _: str) -> str:
        names = {name: f"/{name} {given}".rstrip() for name, (_, given, _) in self._table.items()}
        width = max(map(len, names.values()))
        return "\n".join(f"{names[name]:<{width}}  {text}" for name, (_, _, text) in self._table.items())

    def _exit(self, _: str) -> str:
        raise EOFError


def run(
    *,
    model: Path | None,
    images: Sequence[Path],
    system: str,
    effort: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    device: str,
    dtype: str,
    drafts: DraftOptions,
) -> None:
    """Talk until the input ends. Raises DeepspanError for what is wrong with an option, before anything is loaded."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    level, pictures = read_effort(effort), [read_picture(path) for path in images]
    engine = EngineConfig(**drafts.engine_fields())
    from deepspan.cli.generate import load

    session = Session(load(model, device=device, dtype=dtype, engine=engine), params, effort=level, system=system)
    session.waiting = pictures
    talk(session, _reader(session))


def talk(session: Session, read: Callable[[], str]) -> None:
    """Answer lines until there are no more. read: one line, or EOFError or KeyboardInterrupt to leave."""
    commands = Commands(session)
    while True:
        try:
            line = read().strip()
            if line.startswith("/"):
                _say(commands.run(line))
            elif line:
                _answer(session, line)
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as error:
            raise InputError(f"the input is no {error.encoding} text") from error
        except DeepspanError as error:
            _say(f"error: {error}")


def read_effort(value: str) -> Effort:
    """Raises InputError for an unknown level."""
    levels = get_args(Effort)
    if value not in levels:
        raise InputError(f"effort must be one of {', '.join(levels)}, found {value!r}")
    return cast(Effort, value)


def read_picture(path: Path) -> Picture:
    """Read and decode a file, to know now whether it is a picture. Raises ImageError that names the file."""
    try:
        file = path.expanduser()
        if not file.is_file():
            raise ImageError(f"no picture at {path}")
        with file.open("rb") as stream:
            data = stream.read(DEFAULT_LIMITS.max_bytes + 1)  # one more than allowed tells "too long"
    except (OSError, RuntimeError) as error:
        raise ImageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        decode_image(data, mode="serving")
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error
    return Picture(path=path, data=data)


def _answer(session: Session, question: str) -> None:
    screen = _Screen()
    try:
        with _patient_interrupts() as stopped:
            ending = session.ask(question, screen.show, stopped)
        screen.is_begun |= ending != "interrupted"  # an empty answer is a line too
    finally:
        screen.end()
    if ending == "length":
        _say(f"[stopped after {session.params.max_tokens} tokens: --max-tokens]")
    elif ending == "interrupted":
        _say("[interrupted]" if not session.unasked else "[interrupted before anything came: the question is not kept]")


class _Screen:
    """Shows one answer: text on stdout, reasoning dimmed on stderr, each on lines of its own."""

    def __init__(self) -> None:
        self.is_begun = False
        self._reasons = False

    def show(self, event: TokenEvent) -> None:
        if event.reasoning:
            notes.print(event.reasoning, style="dim", end="", markup=False, soft_wrap=True)
            self._reasons = True
        if event.text:
            self._end_reasoning()
            print(event.text, end="", flush=True)
            self.is_begun = True

    def end(self) -> None:
        self._end_reasoning()
        if self.is_begun:
            print(flush=True)

    def _end_reasoning(self) -> None:
        if self._reasons:
            notes.print()
            self._reasons = False


@contextmanager
def _patient_interrupts() -> Generator[Callable[[], bool]]:
    """Ctrl-C once makes what is yielded true, twice raises KeyboardInterrupt.

    A step of the engine is not torn that way, unless one insists because no token comes.
    """
    came = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, previous)


def _reader(session: Session) -> Callable[[], str]:
    """How lines are read: with a prompt and editing in a terminal, as they are otherwise."""
    if not sys.stdin.isatty():
        return input
    notes.print("/help lists the commands, Ctrl-D leaves", style="dim")
    try:
        import readline
    except ImportError:  # not on every system; lines are read all the same
        pass
    else:

        def offer_again() -> None:
            readline.insert_text(session.unasked)
            session.unasked = ""

        readline.set_startup_hook(offer_again)
    if sys.stdout.isatty():
        return lambda: input(PROMPT)

    def read() -> str:
        notes.print(PROMPT, end="")
        return input()

    return read


def _user_message(turn: Turn, part: Callable[[Picture], Any]) -> dict[str, Any]:
    if not turn.pictures:
        return {"role": "user", "content": turn.question}
    content = [{"type": "image", "image": part(picture)} for picture in turn.pictures]
    return {"role": "user", "content": [*content, {"type": "text", "text": turn.question}]}


def _bytes_part(picture: Picture) -> bytes:
    return picture.data


def _path_part(picture: Picture) -> str:
    return str(picture.path)


def _say(text: str) -> None:
    notes.print(text, markup=False, soft_wrap=True)
