"""From token ids to text: detokenise, tell reasoning from answer, notice the end.

Invariant: whether the output starts inside reasoning is read from the prompt's last token, never from request flags; a
request has exactly one terminal event. One per running request. Called by `engine.core`.
"""

from deepspan.core.media import TokenKind
from deepspan.core.output import FinishReason, PromptLogprobs, RequestOutput, TokenEvent, TokenLogprobs
from deepspan.core.request import Request
from deepspan.text.detokenize import Detokenizer
from deepspan.text.stop import StopStrings
from deepspan.text.tokenizer import Tokenizer


class OutputCollector:
    """Collects the tokens of one request."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        self._index, self._request, self._special = index, request, tokenizer.special
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.params.stop)
        self._in_reasoning = int(request.token_ids[-1]) == tokenizer.special.think_open
        self._token_ids: list[int] = []
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
        self._finish_reason = self._end_of(token_id)
        closes = self._in_reasoning and token_id == self._special.think_close
        delta = self._detokenizer.finish() if closes else self._detokenizer.push([token_id])
        if self._finish_reason is not None:
            delta += self._detokenizer.finish()
        text, reasoning = ("", delta) if self._in_reasoning else (self._watch(delta), "")
        self._in_reasoning &= not closes
        return self._event(token_id, text, reasoning, logprobs)

    def push_prompt(self, found: PromptLogprobs) -> None:
        """Take log-probabilities of prompt tokens; those known already (before a preemption) change nothing."""
        self._prompt_logprobs[found.first - 1 :] = found.tokens

    def end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End without a new token. Returns the terminal event."""
        assert self._finish_reason is None, "a request ends once"
        self._finish_reason, self._error = reason, error
        delta = self._detokenizer.finish()
        if self._in_reasoning:
            return self._event(None, "", delta, None)
        return self._event(None, self._stops.push(delta) + self._stops.finish(), "", None)

    def output(self) -> RequestOutput:
        """The finished request."""
        assert self._finish_reason is not None, "the request is still running"
        params = self._request.params
        return RequestOutput(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            num_prompt_tokens=len(self._request.token_ids),
            num_image_tokens=int((self._request.kinds != TokenKind.TEXT).sum()),
            num_cached_tokens=self.num_cached_tokens,
            stop=self._stop,
            logprobs=tuple(self._logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if params.prompt_logprobs is not None else None,
            error=self._error,
        )

    def _end_of(self, token_id: int) -> FinishReason | None:
        params = self._request.params
        if token_id in params.stop_token_ids:
            self._stop = token_id
            return "stop"
        if token_id == self._special.eos and not params.ignore_eos:
            return "stop"
        return "length" if len(self._token_ids) == params.max_tokens else None

    def _watch(self, delta: str) -> str:
        """Text of the answer that can be given out; a stop string ends the request."""
        text = self._stops.push(delta)
        if self._stops.found is not None:
            self._finish_reason, self._stop = "stop", self._stops.found
        elif self._finish_reason is not None:
            text += self._stops.finish()
        return text

    def _event(self, token_id: int | None, text: str, reasoning: str, logprobs: TokenLogprobs | None) -> TokenEvent:
        self._text.append(text)
        self._reasoning.append(reasoning)
        return TokenEvent(
            request=self._index,
            token_id=token_id,
            text=text,
            reasoning=reasoning,
            finish_reason=self._finish_reason,
            logprobs=logprobs,
            error=self._error,
        )
