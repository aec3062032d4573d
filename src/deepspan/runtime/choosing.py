"""What a running request makes of its logits: the next token, or several where drafts are to be judged.

Owns the tokens that choosing looks at and the place in the grammar. Invariants: what is chosen depends on the request's
own logits, tokens, parameters, drafts and seed; penalties, bad words, grammar and ends see the drafts taken before
them; a request without drafts draws exactly one number for its token, as if nobody drafted; nothing is chosen from
logits that are not numbers. Called by `runtime.runner`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspan.core.output import TokenLogprobs
from deepspan.core.request import Request
from deepspan.runtime.guidance import Guide
from deepspan.runtime.sampler import (
    Purpose,
    adjusted_logits,
    choose_token,
    token_distribution,
    token_logprobs,
    uniform,
)
from deepspan.runtime.verification import accepts, block_length, draw, log_distribution, residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Guesses for the next tokens. log_q: float64 [V] that each was drawn from, None where it was the likeliest.

    Fewer guesses are a shorter record: there is no placeholder, whose id would point at a token of the vocabulary.
    """

    tokens: tuple[int, ...] = ()
    log_q: tuple[Tensor | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.log_q), "every guess was drawn from something"
        assert all(token >= 0 for token in self.tokens), "a placeholder is no guess"

    def first(self, count: int) -> "Drafts":
        return Drafts(tokens=self.tokens[:count], log_q=self.log_q[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """tokens: at least one; logprobs: of each, if asked for; num_accepted: drafts among the tokens.

    num_invalid: drafts that the grammar does not allow, and those behind them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_accepted: int
    num_invalid: int = 0


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """A running request: its tokens after the prompt, its place in its grammar, and the guesses for what comes next.

    eos: id that ends a text. forbidden: bool, tokens that are never chosen.
    """

    request: Request
    generated: list[int]
    eos: int
    forbidden: Tensor
    guide: Guide | None = None
    drafts: Drafts = field(default_factory=Drafts)

    @property
    def stream(self) -> int:
        """Key of the request's random numbers."""
        params = self.request.params
        assert params.seed is not None or params.temperature == 0, "a sampled request has a seed"
        return (params.seed or 0) + (self.request.choice << 64)

    @property
    def is_over(self) -> bool:
        """Whether nothing can come after the last token, as far as token ids tell."""
        return self.ends_at(self.generated[-1]) or len(self.generated) >= self.request.params.max_tokens

    def ends_at(self, token: int) -> bool:
        """Whether a token ends the text."""
        params = self.request.params
        return token in params.stop_token_ids or (token == self.eos and not params.ignore_eos)

    def choose(self, logits_RV: Tensor, drafts: Drafts, *, in_blocks: bool = False) -> Chosen:
        """Judge the drafts, take those that stand and one token more.

        logits_RV: fp32, of the last known token and of each draft. in_blocks: block verification, where the standard
        rule would do as well. Raises InputError if the grammar allows nothing, ArithmeticError for logits that are no
        numbers.
        """
        if bool(torch.isnan(logits_RV).any()):
            raise ArithmeticError("the model's logits are not numbers")
        params = self.request.params
        masked = logits_RV.masked_fill(self.forbidden, -torch.inf)
        # A grammar moves on with every token that is taken; asking it about tokens that are not would take them back.
        if in_blocks and params.temperature > 0 and drafts.tokens and self.guide is None:
            return self._choose_block(masked, drafts)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        num_accepted, step = 0, len(self.generated)
        num_invalid = len(drafts.tokens) - self.guide.count_allowed(drafts.tokens) if self.guide is not None else 0
        for index, row in enumerate(masked):
            token, is_accepted = self._judge(self._adjusted(row), drafts, index, step)
            self._take(token, row, tokens, logprobs)
            num_accepted += is_accepted
            if not is_accepted or self.is_over:
                break
        num_invalid = min(num_invalid, len(drafts.tokens) - num_accepted)  # a finished grammar lets ends repeat
        return Chosen(
            tokens=tuple(tokens), logprobs=tuple(logprobs), num_accepted=num_accepted, num_invalid=num_invalid
        )

    def _judge(self, adjusted_V: Tensor, drafts: Drafts, index: int, step: int) -> tuple[int, bool]:
        """Next token, and whether it is the draft. step: generated tokens before this step."""
        params, count = self.request.params, len(self.generated)
        if index == len(drafts.tokens):
            return choose_token(adjusted_V, params, self.stream, count), False
        draft = drafts.tokens[index]
        if params.temperature == 0:
            token = choose_token(adjusted_V, params, self.stream, count)
            return token, token == draft
        log_p = log_distribution(*token_distribution(adjusted_V, params), len(adjusted_V))
        if accepts(log_p, drafts.log_q[index], draft, uniform(self.stream, count, Purpose.ACCEPT, step)):
            return draft, True
        left = residual(log_p, drafts.log_q[index], draft)
        return draw(left, uniform(self.stream, count)), False

    def _choose_block(self, masked_RV: Tensor, drafts: Drafts) -> Chosen:
        params, step = self.request.params, len(self.generated)
        known = list(self.generated)
        log_p: list[Tensor] = []
        for index, row in enumerate(masked_RV):
            self.generated = [*known, *drafts.tokens[:index]]
            log_p.append(log_distribution(*token_distribution(self._adjusted(row), params), len(row)))
        self.generated = known
        points = [uniform(self.stream, step + i, Purpose.ACCEPT, step) for i in range(len(drafts.tokens))]
        count, log_share = block_length(log_p, drafts.log_q, drafts.tokens, points)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for index in range(count):
            self._take(drafts.tokens[index], masked_RV[index], tokens, logprobs)
            if self.is_over:
                return Chosen(tokens=tuple(tokens), logprobs=tuple(logprobs), num_accepted=index + 1)
        if count == len(drafts.tokens):
            token = choose_token(self._adjusted(masked_RV[count]), params, self.stream, len(self.generated))
        else:
            left = residual(log_p[count], drafts.log_q[count], drafts.tokens[count], log_share)
            token = draw(left, uniform(self.stream, len(self.generated)))
        self._take(token, masked_RV[count], tokens, logprobs)
        return Chosen(tokens=tuple(tokens), logprobs=tuple(logprobs), num_accepted=count)

    def _adjusted(self, masked_V: Tensor) -> Tensor:
        """Logits after everything that the parameters and the grammar do to them."""
        request, params = self.request, self.request.params
        if params.is_plain_greedy:
            return masked_V
        allowed = self.guide.allowed_mask() if self.guide is not None else None
        ends = {self.eos, *params.stop_token_ids}
        return adjusted_logits(masked_V, params, request.token_ids, self.generated, ends, allowed)

    def _take(self, token: int, masked_V: Tensor, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        tokens.append(token)
        self.generated.append(token)
        if self.guide is not None:
            self.guide.accept(token)
        if (count := self.request.params.logprobs) is not None:
            logprobs.append(token_logprobs(masked_V, token, count))
