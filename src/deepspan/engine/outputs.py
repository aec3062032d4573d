"""From token ids to text: detokenise, parse, notice the end.

Invariants: whether the output starts inside reasoning is read from the end of the prompt, never from request flags; a
request has exactly one terminal event. One per running request. Called by `engine.core`.
"""

from collections.abc import Iterable
from dataclasses import replace

from deepspan.core.calls import CallDelta
from deepspan.core.media import TokenKind
from deepspan.core.output import FinishReason, PromptLogprobs, RequestOutput, TokenEvent, TokenLogprobs
from deepspan.core.request import Request
from deepspan.text.detokenize import Detokenizer
from deepspan.text.markup import BAR, THINK_CLOSE, THINK_OPEN
from deepspan.text.parser import Delta, OutputParser
from deepspan.text.special import SpecialIds, open_turn
from deepspan.text.stop import StopStrings
from deepspan.text.tokenizer import Tokenizer


class OutputCollector:
    """Collects the tokens of one request."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        params, self._special = request.params, tokenizer.special
        self._index, self._request = index, request
        self._detokenizer = Detokenizer(
            tokenizer, keep_special=not request.form.is_chat and not params.skip_special_tokens
        )
        self._marks = _marks(tokenizer.special) if request.form.is_chat else {}
        self._parser = self._new_parser(request, tokenizer) if request.form.is_chat else None
        self._stops = StopStrings(params.stop, keep=params.include_stop_str_in_output)
        self._reasoning_stops = StopStrings(params.stop, keep=params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._num_reasoning = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._stop: str | int | None = None
        self._error: str | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> TokenEvent:
        """Take one new token and say what it changes."""
        assert self._finish_reason is None, "a finished request takes no more tokens"
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        is_reasoning = self._parser is not None and self._parser.in_reasoning
        self._num_reasoning += is_reasoning
        self._finish_reason = self._end_of(token_id)
        return replace(self._event(token_id, self._decoded([token_id]), logprobs), is_reasoning=is_reasoning)

    def push_prompt(self, found: PromptLogprobs) -> None:
        """Take log-probabilities of prompt tokens; those known already (before a preemption) change nothing."""
        self._prompt_logprobs[found.first - 1 :] = found.tokens

    def end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End without a new token. Returns the terminal event."""
        assert self._finish_reason is None, "a request ends once"
        self._finish_reason, self._error = reason, error
        return self._event(None, "", None)

    def output(self) -> RequestOutput:
        """The finished request."""
        assert self._finish_reason is not None, "the request is still running"
        params = self._request.params
        calls = self._parser.calls if self._parser is not None else ()
        return RequestOutput(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            num_prompt_tokens=len(self._request.token_ids),
            num_image_tokens=int((self._request.kinds != TokenKind.TEXT).sum()),
            num_cached_tokens=self.num_cached_tokens,
            num_reasoning_tokens=self._num_reasoning,
            # A call that the model itself left unfinished is no call; one that a limit cut off is shown as it is.
            calls=tuple(call for call in calls if call.is_complete or self._finish_reason != "stop"),
            stop=self._stop,
            logprobs=tuple(self._logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if params.prompt_logprobs is not None else None,
            error=self._error,
        )

    def _new_parser(self, request: Request, tokenizer: Tokenizer) -> OutputParser:
        tail = open_turn(request.token_ids, tokenizer.special)
        in_reasoning = len(tail) > 0 and tail[0] == tokenizer.special.think_open
        parser = OutputParser(request.form.tools, in_reasoning=in_reasoning)
        parser.prime(self._decoded(tail[1:]) + self._detokenizer.finish())
        return parser

    def _decoded(self, token_ids: Iterable[int]) -> str:
        """New text, with marks for the special tokens that mean something to the parser."""
        pieces: list[str] = []
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            pieces.append(self._detokenizer.push([token_id]) if mark is None else self._detokenizer.finish() + mark)
        return "".join(pieces)

    def _end_of(self, token_id: int) -> FinishReason | None:
        params = self._request.params
        if token_id in params.stop_token_ids:
            self._stop = token_id
            return "stop"
        # A turn that the model opens for somebody else ends its own.
        others = (self._special.user, self._special.assistant) if self._request.form.is_chat else ()
        if (token_id == self._special.eos or token_id in others) and not params.ignore_eos:
            return "stop"
        return "length" if len(self._token_ids) == params.max_tokens else None

    def _parsed(self, text: str) -> Delta:
        """What new text means, all that was held back with it if it is the last."""
        ends = self._finish_reason is not None
        if ends:
            text += self._detokenizer.finish()
        if self._parser is None:
            return Delta(content=text)
        delta = self._parser.push(text)
        if not ends:
            return delta
        last = self._parser.finish(cut_off=self._finish_reason != "stop")
        return Delta(
            reasoning=delta.reasoning + last.reasoning,
            content=delta.content + last.content,
            calls=delta.calls + last.calls,
        )

    def _event(self, token_id: int | None, new: str, logprobs: TokenLogprobs | None) -> TokenEvent:
        delta = self._parsed(new)
        reasoning = self._watch(self._reasoning_stops, delta.reasoning)
        stopped = self._reasoning_stops.found is not None
        if not stopped and self._parser is not None and not self._parser.in_reasoning:
            reasoning += self._reasoning_stops.finish()
        text = "" if stopped else self._watch(self._stops, delta.content)
        if delta.calls and self._stops.found is None:
            text += self._stops.finish()
        calls: tuple[CallDelta, ...] = () if stopped or self._stops.found is not None else delta.calls
        self._text.append(text)
        self._reasoning.append(reasoning)
        return TokenEvent(
            request=self._index,
            token_id=token_id,
            text=text,
            reasoning=reasoning,
            finish_reason=self._finish_reason,
            calls=calls,
            logprobs=logprobs,
            error=self._error,
        )

    def _watch(self, stops: StopStrings, delta: str) -> str:
        """Text that can be given out; a stop string ends the request."""
        text = stops.push(delta)
        if stops.found is not None:
            self._finish_reason, self._stop = "stop", stops.found
        elif self._finish_reason is not None:
            text += stops.finish()
        return text


def _marks(special: SpecialIds) -> dict[int, str]:
    return {special.think_open: THINK_OPEN, special.think_close: THINK_CLOSE, special.dsml: BAR}
