"""Holds one running request to its grammar: which tokens it may choose next.

Owns where the grammar begins: at the first token after the prompt, or, if the prompt ends inside reasoning, after the
token that ends it; reasoning itself is free. Invariants: what is allowed depends on the grammar, the prompt and the
request's own tokens, so that a request that was preempted goes on as if it had not been; the end token is allowed when
the answer may end, and alone when nothing else can follow. Called by `runtime.runner`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepspan.core.grammar import CompiledGrammar
from deepspan.core.request import Request


class Guide:
    """Where one request stands in its grammar."""

    def __init__(
        self, grammar: CompiledGrammar, prompt: Sequence[int] | np.ndarray, generated: Sequence[int], like_V: Tensor
    ) -> None:
        """generated: tokens after the prompt so far. like_V: a tensor of the size and on the device of the masks.

        Raises InputError if the grammar does not allow what was generated.
        """
        self._matcher, self._end_of_reasoning = grammar.matcher(), grammar.think_close
        self._waits = grammar.in_reasoning(prompt)
        self._size, self._device = len(like_V), like_V.device
        for token_id in generated:
            self.accept(token_id)

    @classmethod
    def of(cls, request: Request, generated: Sequence[int], like_V: Tensor) -> "Guide | None":
        """The guide of a request that begins or goes on; None if it has no grammar."""
        if request.grammar is None:
            return None
        return cls(request.grammar, request.token_ids, generated, like_V)

    def allowed_mask(self) -> Tensor | None:
        """Tokens that may come next: bool [V], or None if all may. Raises InputError if there is none."""
        if self._waits:
            return None
        known = torch.from_numpy(self._matcher.allowed())
        mask = torch.zeros(self._size, dtype=torch.bool)  # the model may have more rows than there are tokens
        mask[: len(known)] = known
        return mask.to(self._device)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these could come next, one after the other; nothing is taken."""
        free = 0  # reasoning, and the token that ends it
        if self._waits:
            free = tokens.index(self._end_of_reasoning) + 1 if self._end_of_reasoning in tokens else len(tokens)
        return free + self._matcher.count_allowed(tokens[free:])

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen. Raises InputError if the grammar does not allow it."""
        if self._waits:
            self._waits = token_id != self._end_of_reasoning
        else:
            self._matcher.accept(token_id)
