"""How many tokens to guess: a fixed number, or as many as pay.

Owns the measure: what a step costs at each depth and how often the first k guesses are all taken, by size of the batch.
A step of depth k yields 1 + the sum of those shares; the depth with the most tokens a second is taken. Invariant:
trying depths that may not pay takes a bounded share of the time, so that the automatic mode stays within a few percent
of not drafting where drafting does not pay. Called by `engine.core`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_STEPS = 3  # of every end of the scale, before anything is decided
SETTLING = 2  # steps after a change that still carry drafts of the depth before, or none
PROBE_SHARE = 0.02  # of the time
LEARNING = 0.1  # weight of a new step in the means
MARGIN = 1.02  # a depth must promise so much more than no drafting


@dataclass(slots=True, kw_only=True)
class _Costs:
    """seconds: mean of a step, counts: how many there were, by depth. lost: seconds lost to trials, of the total."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    lost: float = 0.0
    total: float = 0.0


class DraftDepth:
    """The depth of each step. Deterministic with a fixed depth, led by the clock with an automatic one."""

    def __init__(self, num_drafts: int, *, is_fixed: bool) -> None:
        self.num_drafts, self.is_fixed = num_drafts, is_fixed
        self._survival = [1.0] * num_drafts  # optimistic: a depth that is never tried is never learnt
        self._seen = [0] * num_drafts
        self._costs: dict[int, _Costs] = {}
        self._depth, self._age = 0, 0

    def choose(self, num_decoding: int) -> int:
        """Depth of the next step. num_decoding: requests that it will guess for, about."""
        if self.is_fixed or not self.num_drafts:
            return self.num_drafts
        if self._age < SETTLING + FIRST_STEPS and self._age:  # a depth is measured before it is left
            return self._depth
        costs = self._costs.setdefault(_bucket(num_decoding), _Costs())
        depth = self._wanted(costs)
        if depth != self._depth:
            self._depth, self._age = depth, 0
        return depth

    def observe(
        self, num_decoding: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Take in a step that only decoded. drafted, accepted: of each request of the step."""
        if self.is_fixed or not self.num_drafts:
            return
        for count, taken in zip(drafted, accepted, strict=True):
            for position in range(count):
                self._seen[position] += 1
                weight = max(LEARNING / 5, 1 / self._seen[position])
                self._survival[position] += weight * ((taken > position) - self._survival[position])
        self._age += 1
        if self._age <= SETTLING:
            return
        costs = self._costs.setdefault(_bucket(num_decoding), _Costs())
        count = costs.counts[depth] = costs.counts.get(depth, 0) + 1
        mean = costs.seconds.setdefault(depth, seconds)
        # The least of the first few: a step that was disturbed says nothing about the depth.
        costs.seconds[depth] = min(mean, seconds) if count <= FIRST_STEPS else mean + LEARNING * (seconds - mean)
        costs.total += seconds
        best = self._rate(costs, 0)
        if depth and best is not None:
            tokens = 1 + sum(self._survival[:depth])
            costs.lost += max(0.0, seconds - tokens / best)

    def _wanted(self, costs: _Costs) -> int:
        for depth in (self.num_drafts, 0):
            if costs.counts.get(depth, 0) < FIRST_STEPS:
                return depth
        rates = {depth: rate for depth in range(self.num_drafts + 1) if (rate := self._rate(costs, depth)) is not None}
        best = max(rates, key=lambda depth: (rates[depth], -depth))
        if rates[best] < MARGIN * rates[0]:
            best = 0
        if best == 0 and costs.lost < PROBE_SHARE * costs.total:
            # Texts change: what did not pay is tried again, as often as the share of time allows.
            tried = [depth for depth in rates if depth]
            return max(tried, key=lambda depth: rates[depth])
        return best

    def _rate(self, costs: _Costs, depth: int) -> float | None:
        """Tokens a second of one request; depths between those measured are interpolated."""
        tokens = 1 + sum(self._survival[:depth])
        if depth in costs.seconds:
            return tokens / costs.seconds[depth]
        below = [known for known in costs.seconds if known < depth]
        above = [known for known in costs.seconds if known > depth]
        if not below or not above:
            return None
        low, high = max(below), min(above)
        share = (depth - low) / (high - low)
        return tokens / (costs.seconds[low] + share * (costs.seconds[high] - costs.seconds[low]))


def _bucket(num_decoding: int) -> int:
    """Batches of about the same size are measured together."""
    return num_decoding.bit_length()
