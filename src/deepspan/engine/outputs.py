"""From token ids to text: detokenise, tell reasoning from answer, notice the end.

Invariant: whether the output starts inside reasoning is read from the prompt's last token, never from request flags.
One per running request. Called by `llm`.
"""

from deepspan.core.media import TokenKind
from deepspan.core.output import FinishReason, RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.text.detokenize import Detokenizer
from deepspan.text.tokenizer import Tokenizer


class OutputCollector:
    """Collects the tokens of one request."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        self._index, self._request, self._special = index, request, tokenizer.special
        self._detokenizer = Detokenizer(tokenizer)
        self._in_reasoning = int(request.token_ids[-1]) == tokenizer.special.think_open
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason: FinishReason | None = None

    def push(self, token_id: int) -> TokenEvent:
        """Take one new token and say what it changes."""
        assert self._finish_reason is None, "a finished request takes no more tokens"
        self._token_ids.append(token_id)
        params = self._request.params
        if token_id == self._special.eos and not params.ignore_eos:
            self._finish_reason = "stop"
        elif len(self._token_ids) == params.max_tokens:
            self._finish_reason = "length"
        closes = self._in_reasoning and token_id == self._special.think_close
        delta = self._detokenizer.finish() if closes else self._detokenizer.push([token_id])
        if self._finish_reason is not None:
            delta += self._detokenizer.finish()
        text, reasoning = ("", delta) if self._in_reasoning else (delta, "")
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._in_reasoning &= not closes
        return TokenEvent(
            request=self._index,
            token_id=token_id,
            text=text,
            reasoning=reasoning,
            finish_reason=self._finish_reason,
        )

    def output(self) -> RequestOutput:
        """The finished request."""
        assert self._finish_reason is not None, "the request is still running"
        return RequestOutput(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            num_prompt_tokens=len(self._request.token_ids),
            num_image_tokens=int((self._request.kinds != TokenKind.TEXT).sum()),
        )
