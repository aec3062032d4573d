"""How many tokens to guess: a fixed number, or as many as pay.

Owns the measure: what a step costs at each depth and how often the first k guesses are all taken, by size of the batch.
A step of depth k yields 1 + the sum of those shares; the depth with the most tokens a second is taken. Texts and loads
change, so what is not used is measured again. Invariant: such trials, with the steps that still carry their drafts,
take a bounded share of the time, so that the automatic mode stays within a few percent of the best depth, of not
drafting where that is best. Called by `engine.core`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_STEPS = 3  # of a depth, before anything is decided about it
SETTLING = 2  # steps after a change that still carry drafts of the depth before, or none
PROBE_SHARE = 0.02  # of the time
LEARNING = 0.1  # weight of a new step in the means
LEAP = 3  # times the mean: what a single step may count for
MARGIN = 1.02  # a depth must promise so much more than no drafting


@dataclass(slots=True, kw_only=True)
class _Costs:
    """seconds: mean of a step, counts: how many there were, last: when, by depth. lost: by trials, of the total."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    lost: float = 0.0
    total: float = 0.0
    steps: int = 0


class DraftDepth:
    """The depth of each step. Deterministic with a fixed depth, led by the clock with an automatic one."""

    def __init__(self, num_drafts: int, *, is_fixed: bool) -> None:
        self.num_drafts, self.is_fixed = num_drafts, is_fixed
        self._survival = [1.0] * num_drafts  # optimistic: a depth that is never tried is never learnt
        self._seen = [0] * num_drafts
        self._costs: dict[int, _Costs] = {}
        self._depth, self._age = 0, 0
        self._trial: tuple[int, int] | None = None  # depth tried, and the one that it is tried against

    def choose(self, num_decoding: int) -> int:
        """Depth of the next step. num_decoding: requests that it will guess for, about."""
        if self.is_fixed or not self.num_drafts:
            return self.num_drafts
        if 0 < self._age < SETTLING + FIRST_STEPS:  # a depth is measured before it is left
            return self._depth
        depth = self._wanted(self._costs.setdefault(_bucket(num_decoding), _Costs()))
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
        costs = self._costs.setdefault(_bucket(num_decoding), _Costs())
        costs.steps += 1
        costs.total += seconds
        if self._age > SETTLING:
            self._measure(costs, depth, seconds)
        if self._trial is not None:
            self._charge(costs, depth, seconds, 1 + sum(accepted) / max(1, len(accepted)))

    def _measure(self, costs: _Costs, depth: int, seconds: float) -> None:
        costs.last[depth] = costs.steps
        count = costs.counts[depth] = costs.counts.get(depth, 0) + 1
        mean = seconds if count == 1 else costs.seconds[depth]
        # The least of the first few, and no leaps: a step that was disturbed says nothing about the depth.
        change = LEARNING * (min(seconds, LEAP * mean) - mean)
        costs.seconds[depth] = min(mean, seconds) if count <= FIRST_STEPS else mean + change

    def _charge(self, costs: _Costs, depth: int, seconds: float, tokens: float) -> None:
        """What a step of a trial cost more than its tokens would have cost otherwise. tokens: of each request."""
        assert self._trial is not None, "only trials are charged"
        tried, best = self._trial
        if (rate := self._rate(costs, best)) is not None:
            undisturbed = min(seconds, LEAP * max(costs.seconds.values()))
            costs.lost = max(0.0, costs.lost + undisturbed - tokens / rate)
        if depth != tried and self._age >= SETTLING:
            self._trial = None

    def _wanted(self, costs: _Costs) -> int:
        for depth in (0, self.num_drafts):
            if costs.counts.get(depth, 0) < FIRST_STEPS:
                if depth and self._trial is None:
                    self._trial = depth, 0
                return depth
        rates = {depth: rate for depth in range(self.num_drafts + 1) if (rate := self._rate(costs, depth)) is not None}
        best = max(rates, key=lambda depth: (rates[depth], -depth))
        if rates[best] < MARGIN * rates[0]:
            best = 0
        if self._trial is None and costs.lost < PROBE_SHARE * costs.total:
            # All guesses tell of the text, none of them of the load; what lies between is interpolated.
            tried = min({0, self.num_drafts} - {best}, key=lambda depth: costs.last[depth])
            costs.counts[tried] = 0
            self._trial = tried, best
            return tried
        if self._trial is not None and self._trial[0] == best:
            self._trial = None  # what was tried is what pays
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
