"""Choosing the next token of a request from its logits.

Invariant: the choice depends on the request's own logits, tokens, parameters and seed, never on batch mates: random
numbers come from a counter-based stream, one number per token, and greedy requests draw none.
Called by `runtime.runner`.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from deepspan.core.output import TokenLogprobs
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError


class Purpose(IntEnum):
    """What a random number decides. A token that is not drafted takes TOKEN alone, with drafting on or off."""

    TOKEN = 0
    ACCEPT = 1
    DRAFT = 2


def choose_token(logits_V: Tensor, params: SamplingParams, seed: int, num_generated: int) -> int:
    """Next token id. logits_V: fp32 [V], -inf where a token may never be chosen. Ties of greedy go to the lowest id."""
    if params.temperature == 0:
        return int(torch.argmax(logits_V))
    probs, ids = token_distribution(logits_V, params)
    cumulative = probs.cumsum(0)
    point = uniform(seed, num_generated) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, torch.tensor(point, dtype=cumulative.dtype), right=True))
    return int(ids[min(index, len(ids) - 1)])


def adjusted_logits(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] | np.ndarray,
    generated: Sequence[int],
    ends: Collection[int],
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Logits after bias, penalties, bad words, grammar and the minimum length: a new tensor, fp32 [V].

    prompt, generated: token ids so far. ends: ids that end the text. allowed_V: bool, what the grammar allows, if any.
    An answer that is complete ends even before its minimum length: then nothing but an end is allowed.
    Raises InputError if the other parameters leave nothing that the grammar allows.
    """
    logits = logits_V.clone()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*np.asarray(prompt).tolist(), *generated}), device=logits.device)
        seen = seen[seen < len(logits)]
        known = logits[seen]
        logits[seen] = torch.where(known > 0, known / params.repetition_penalty, known * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        tokens, counts = torch.tensor(generated, device=logits.device).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for word in params.bad_words:
        head = list(word[:-1])
        if not head or list(generated[-len(head) :]) == head:
            logits[word[-1]] = -torch.inf
    if params.allowed_token_ids:
        kept = torch.full_like(logits, -torch.inf)
        allowed = torch.tensor(sorted(params.allowed_token_ids), device=logits.device)
        logits = kept.index_copy(0, allowed, logits[allowed])
    if allowed_V is not None:
        logits.masked_fill_(~allowed_V, -torch.inf)
        if bool((logits == -torch.inf).all()):
            raise InputError("logit_bias, bad_words and allowed_token_ids leave no token that the grammar allows")
    if len(generated) < params.min_tokens:
        longer = logits.index_fill(0, torch.tensor(sorted(ends), device=logits.device), -torch.inf)
        if allowed_V is None or not bool((longer == -torch.inf).all()):
            return longer
    return logits


def token_logprobs(logits_V: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities, before any parameter acts, of a token and of the `count` most likely ones."""
    logprobs = logits_V.double().log_softmax(0)
    top = logprobs.sort(descending=True, stable=True).indices[:count].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=int((logprobs > logprobs[token_id]).sum()) + 1,
        top=tuple((token, float(logprobs[token])) for token in top),
    )


def token_distribution(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(probabilities float64 [K], token ids [K]) of the tokens that may be drawn, most likely first.

    Order of the cuts: temperature, min_p (of the largest probability), top_k, top_p (smallest head that reaches it).
    """
    logits, ids = logits_V.double().cpu().sort(descending=True, stable=True)
    # The largest is taken off first, so that no temperature, however small, divides to infinity.
    probs = ((logits - logits[0]) / params.temperature).softmax(0)
    keep = int((probs >= params.min_p * probs[0]).sum()) if params.min_p else int((probs > 0).sum())
    if params.top_k:
        keep = min(keep, params.top_k)
    probs, ids = probs[:keep], ids[:keep]
    probs = probs / probs.sum()
    if params.top_p < 1:
        before = probs.cumsum(0) - probs
        keep = int((before < params.top_p).sum())
        probs, ids = probs[:keep], ids[:keep]
        probs = probs / probs.sum()
    return probs, ids


def uniform(seed: int, index: int, purpose: Purpose = Purpose.TOKEN, step: int = 0) -> float:
    """The `index`-th number of a request's stream, uniform on [0, 1).

    purpose: what it decides; no two purposes share a number. step: where one index is decided upon more than once, what
    tells the times apart.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=(0, step, purpose, index))).random())
