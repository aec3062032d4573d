"""What a model generated, as it arrives: reasoning, answer, calls of tools.

One machine for streams and for whole outputs. Invariants: what the deltas of any cut of the output add up to is the
same; markup of calls never reaches the answer, save where it can be no call, and then it is there as text; newlines
around reasoning and before calls belong to the markup. Where the output starts (in reasoning, in the answer, inside a
block of calls) is read from the end of the prompt, never from flags of the request.

Called by `engine.outputs`, one per choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspan.core.calls import CallDelta, ToolCall
from deepspan.text.arguments import Arguments
from deepspan.text.markup import THINK_CLOSE, THINK_OPEN, Beginning, Tag, find_tag, spelt


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new. All three may be empty."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class OutputParser:
    """Parses one output. `push` text with marks of `text.markup` for special tokens, then `finish`."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None, *, in_reasoning: bool) -> None:
        """tools: schema of parameters by name; None if markup of calls is text. in_reasoning: where the output starts,
        which is right behind a think tag; otherwise `prime`."""
        self._tools = tools
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._reason if in_reasoning else self._answer
        self._at_start = True  # of reasoning or answer: newlines are dropped
        self._is_first = True  # nothing was generated yet: a think tag opens reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._calls: list[ToolCall] = []
        self._arguments: Arguments | None = None
        self._body = ""  # text inside a call that is no parameter
        self._cut_off = False

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning, as far as is known."""
        return self._state == self._reason

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Calls so far; the last one may be incomplete."""
        return tuple(self._calls)

    def prime(self, text: str) -> None:
        """Take the part of the answer that is in the prompt already. Nothing of it is given out."""
        if text:
            self.push(text)
            self._buffer, self._at_start, self._is_first = "", False, False

    def push(self, text: str) -> Delta:
        """Take more of the output."""
        if self._is_first and text:
            self._is_first = False
            if text.startswith(THINK_OPEN):
                text, self._state = text[1:], self._reason
        self._buffer += text
        return self._run(final=False)

    def finish(self, *, cut_off: bool) -> Delta:
        """The output has ended. cut_off: by a limit, so that what is unclosed stays unclosed."""
        self._cut_off = cut_off
        return self._run(final=True)

    def _run(self, *, final: bool) -> Delta:
        while self._state(final):
            pass
        delta = Delta(reasoning="".join(self._reasoning), content="".join(self._content), calls=_joined(self._deltas))
        self._reasoning.clear()
        self._content.clear()
        self._deltas.clear()
        return delta

    # Each state takes what it can from the front of the buffer; True if there may be more to take in the next state.

    def _reason(self, final: bool) -> bool:
        close = self._buffer.find(THINK_CLOSE)
        before = self._buffer if close < 0 else self._buffer[:close]
        tag = self._find(before)
        if tag is not None and (isinstance(tag, Tag) or close < 0):
            return self._meet(tag, self._reasoning, final)
        if close < 0:
            self._buffer = self._give(self._reasoning, self._buffer, final=final)
            return False
        self._give(self._reasoning, before.rstrip("\n"), final=True)
        self._buffer = self._buffer[close + 1 :]
        self._state, self._at_start = self._answer, True
        return True

    def _answer(self, final: bool) -> bool:
        self._buffer = self._buffer.replace(THINK_CLOSE, "")  # a stray one means nothing
        tag = self._find(self._buffer)
        if tag is not None:
            return self._meet(tag, self._content, final)
        self._buffer = self._give(self._content, self._buffer, final=final)
        return False

    def _meet(self, tag: Tag | Beginning, out: list[str], final: bool) -> bool:
        """A tag, or the beginning of one, in reasoning or answer."""
        before, rest = self._buffer[: tag.start], self._buffer[tag.start :]
        if isinstance(tag, Beginning) and not final:
            self._buffer = self._give(out, before, final=False) + rest
            return False
        if isinstance(tag, Beginning) and not tag.has_bar:
            self._buffer = self._give(out, self._buffer, final=True)
            return False
        # The newlines before markup belong to it, and so does white space that is all there is.
        before = before.rstrip("\n")
        self._give(out, "" if self._at_start and not before.strip() else before, final=True)
        if isinstance(tag, Beginning):  # the output ends in the middle of a tag: it would have been markup
            self._buffer = ""
            return False
        self._buffer = self._buffer[tag.end :]
        if not tag.is_closer and tag.kind != "parameter":
            self._state = self._between
            if tag.kind == "invoke":
                self._begin_call(tag, rest[: tag.end - tag.start])
        return True

    def _between(self, final: bool) -> bool:
        """In a block or after one: text is dropped, calls are taken."""
        tag = find_tag(self._buffer)
        if not isinstance(tag, Tag):
            self._buffer = "" if final or tag is None else self._buffer[tag.start :]
            return False
        whole = self._buffer[tag.start : tag.end]
        self._buffer = self._buffer[tag.end :]
        if tag.kind == "invoke" and not tag.is_closer:
            self._begin_call(tag, whole)
        return True

    def _begin_call(self, tag: Tag, whole: str) -> None:
        name = spelt(tag.attributes.get("name", ""))
        if not name:  # it can be no call: nothing is lost if it is shown as what it is
            self._content.append(spelt(whole))
            self._state = self._between if tag.closes_itself else self._show
            return
        self._arguments, self._body = Arguments((self._tools or {}).get(name, {})), ""
        self._state = self._inside
        self._calls.append(ToolCall(name=name, arguments="", is_complete=False))
        self._deltas.append(CallDelta(index=len(self._calls) - 1, name=name, arguments=""))
        if tag.closes_itself:
            self._end_call()

    def _show(self, final: bool) -> bool:
        """In a call without a name, which is text up to its end."""
        tag = find_tag(self._buffer)
        if not isinstance(tag, Tag):
            end = len(self._buffer) if tag is None or final else tag.start
        else:
            is_own = tag.kind == "parameter" or (tag.kind == "invoke" and tag.is_closer)
            end = tag.end if is_own else tag.start
            self._state = self._show if tag.kind == "parameter" else self._between
        self._content.append(spelt(self._buffer[:end]))
        self._buffer = self._buffer[end:]
        return isinstance(tag, Tag)

    def _inside(self, final: bool) -> bool:
        """Between the parameters of a call."""
        assert self._arguments is not None
        tag = find_tag(self._buffer)
        if not isinstance(tag, Tag):
            start = len(self._buffer) if tag is None or final else tag.start
            self._body, self._buffer = self._body + self._buffer[:start], self._buffer[start:]
            if final:
                self._break_off()
            return False
        self._body += self._buffer[: tag.start]
        if tag.kind == "parameter" and not tag.is_closer:
            self._buffer = self._buffer[tag.end :]
            self._write(self._arguments.begin(tag.attributes.get("name", ""), tag.attributes.get("string")))
            if tag.closes_itself:
                self._write(self._arguments.end())
            else:
                self._state = self._value
            return True
        if tag.kind == "parameter":
            self._buffer = self._buffer[tag.end :]
            return True
        self._end_call()
        if tag.kind == "invoke" and tag.is_closer:
            self._buffer = self._buffer[tag.end :]
        return True  # another call, or the end of the block, closes this one too

    def _value(self, final: bool) -> bool:
        """In the value of a parameter, which ends at its closer; a next parameter or the call's closer end it too."""
        assert self._arguments is not None
        tag = find_tag(self._buffer)
        while isinstance(tag, Tag) and not _ends_value(tag):
            tag = find_tag(self._buffer, tag.start + 1)
        if isinstance(tag, Tag):
            value = self._buffer[: tag.start]
            if tag.kind == "parameter" and tag.is_closer:
                self._buffer = self._buffer[tag.end :]
            else:
                value, self._buffer = value.removesuffix("\n"), self._buffer[tag.start :]
            self._write(self._arguments.add(value))
            self._write(self._arguments.end())
            self._state = self._inside
            return True
        start = len(self._buffer) if tag is None or final else tag.start
        if not final and start and self._buffer[start - 1] == "\n":
            start -= 1
        is_markup = isinstance(tag, Beginning) and tag.has_bar
        value = self._buffer[: tag.start] if tag is not None and is_markup and final else self._buffer[:start]
        self._write(self._arguments.add(value))
        self._buffer = self._buffer[start:]
        return False

    def _end_call(self) -> None:
        assert self._arguments is not None
        self._write(self._arguments.close(self._body))
        self._calls[-1] = replace(self._calls[-1], is_complete=True)
        self._state = self._between

    def _break_off(self) -> None:
        """The output ends inside a call but outside a value: whole parameters make a whole call."""
        assert self._arguments is not None
        if not self._cut_off and not self._arguments.is_empty:
            self._end_call()

    def _write(self, text: str) -> None:
        if text:
            call = self._calls[-1]
            self._calls[-1] = replace(call, arguments=call.arguments + text)
            self._deltas.append(CallDelta(index=len(self._calls) - 1, name=None, arguments=text))

    def _find(self, text: str) -> Tag | Beginning | None:
        return None if self._tools is None else find_tag(text)

    def _give(self, out: list[str], text: str, *, final: bool) -> str:
        """Give out text of reasoning or answer, but for newlines at its start. Returns what must wait.

        Newlines at the end wait, and so does white space that is all there is: markup may follow.
        """
        if self._at_start:
            text = text.lstrip("\n")
        if out is self._content and self._tools is None:
            final = True  # nothing can follow that the answer's white space would belong to
        given = text if final else text.rstrip("\n")
        if self._at_start and not final and not given.strip():
            given = ""
        self._at_start &= not given
        if given:
            out.append(spelt(given))
        return text[len(given) :]


def _ends_value(tag: Tag) -> bool:
    if tag.is_closer:
        return tag.kind in ("parameter", "invoke")
    return tag.kind == "parameter" and "name" in tag.attributes


def _joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """Pieces of the same call as one."""
    joined: list[CallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
