"""Choosing how many tokens to guess, on a clock of our own: what is chosen, and what finding out costs."""

from itertools import pairwise

import numpy as np
import pytest

from deepspan.sched.draft_depth import FIRST_STEPS, MARGIN, PROBE_SHARE, SETTLING, DraftDepth

N = 5
STEPS = 2000


class Clock:
    """Serves texts whose guesses are each right with one probability; a step costs what it judges and guesses."""

    def __init__(self, num_drafts=N, seed=0):
        self.depth, self.rng = DraftDepth(num_drafts, is_fixed=False), np.random.default_rng(seed)
        self.chosen, self.seconds, self.tokens, self.plain = [], 0.0, 0, 0.0
        self._guessed = 0

    def run(self, steps, right, per_guess, batch=1, fixed=1.0, noise=0.0):
        """per_guess: cost of one guess judged, as a share of a step without any. fixed: cost of such a step."""
        for _ in range(steps):
            depth = self.depth.choose(batch)
            taken = [self._taken(right) for _ in range(batch)]
            seconds = fixed * (1 + per_guess * self._guessed + 0.02 * bool(depth))
            seconds *= 1 + noise * self.rng.exponential()
            self.depth.observe(batch, depth, seconds, [self._guessed] * batch, taken)
            self.chosen.append(depth)
            self.seconds += seconds
            self.tokens += batch + sum(taken)
            self.plain += fixed * (1 + noise) * (batch + sum(taken)) / batch  # time for as much without guesses
            self._guessed = depth
        return self

    def _taken(self, right):
        misses = np.flatnonzero(self.rng.random(self._guessed) >= right)
        return int(misses[0]) if len(misses) else self._guessed

    @property
    def gain(self):
        """Speed, as a multiple of that without guesses."""
        return self.plain / self.seconds


def ideal(right, per_guess, depth):
    return sum(right**k for k in range(depth + 1)) / (1 + per_guess * depth + 0.02 * bool(depth))


def share_of(chosen, depth):
    return chosen.count(depth) / len(chosen)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("per_guess", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_automatic_depth_is_nearly_as_fast_as_the_best_one(right, per_guess, noise):
    """Not drafting is one of them: where it is best, what is lost is the share of trials and the first of them."""
    clock = Clock().run(STEPS, right, per_guess, noise=noise)
    best = max(ideal(right, per_guess, depth) for depth in range(N + 1))
    # Estimates between measured depths are interpolated, so a neighbour of the best depth may be taken for it.
    assert clock.gain > best * (1 - PROBE_SHARE - 0.1) if best > MARGIN else clock.gain > 1 - PROBE_SHARE - 0.02


@pytest.mark.parametrize("steps", [60, 200, 600])
@pytest.mark.parametrize("per_guess", [0.1, 0.35])
def test_loss_where_nothing_pays_is_one_trial_and_a_share_of_the_time(steps, per_guess):
    clock = Clock().run(steps, 0.0, per_guess)
    # A trial is begun while the share is not used up, lasts until it is measured, and one step more judges its guesses.
    trial = (SETTLING + FIRST_STEPS) * (per_guess * N + 0.02)
    assert clock.seconds - clock.plain <= trial + PROBE_SHARE * clock.seconds + 1e-9
    assert set(clock.chosen) == {0, N}


def test_guesses_that_cost_nothing_and_stand_are_all_made():
    clock = Clock().run(STEPS, 0.95, 0.01)
    assert share_of(clock.chosen, N) > 0.9
    assert clock.gain > 3.5


def test_depth_between_is_found():
    """At 0.1 a guess and 0.6 right, two or three guesses are best, clearly before none and before five."""
    values = [ideal(0.6, 0.1, depth) for depth in range(N + 1)]
    assert max(values) > 1.03 * max(values[0], values[N])
    chosen = Clock().run(STEPS, 0.6, 0.1).chosen[STEPS // 2 :]
    assert share_of(chosen, 2) + share_of(chosen, 3) > 0.7


def test_margin_keeps_from_drafting_for_next_to_nothing():
    assert 1 < ideal(0.11, 0.08, 1) < MARGIN
    assert share_of(Clock().run(STEPS, 0.11, 0.08).chosen, 0) > 0.8


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_text_that_changes_is_noticed(before, after):
    clock = Clock().run(1000, before, 0.1)
    changed = len(clock.chosen)
    clock.run(1500, after, 0.1)
    last = clock.chosen[changed + 1000 :]
    assert share_of(last, N if after else 0) > 0.8


def test_load_that_changes_is_noticed():
    """Guesses pay as long as the steps are cheap to widen; the cost without any is measured again, too."""
    clock = Clock().run(600, 0.8, 0.05)
    assert share_of(clock.chosen[300:], 0) < 0.1
    clock.run(600, 0.8, 1.0, fixed=0.25)  # everything four times as fast, guesses dear
    assert share_of(clock.chosen[-300:], 0) > 0.8
    clock.run(600, 0.8, 0.05, fixed=3.0)
    assert share_of(clock.chosen[-300:], 0) < 0.1


def test_batches_of_different_sizes_have_depths_of_their_own():
    """Alone, rows are cheap; together they are not."""
    clock = Clock()
    for _ in range(12):
        alone = len(clock.chosen)
        clock.run(100, 0.8, 0.02, batch=1)
        together = len(clock.chosen)
        clock.run(100, 0.8, 0.9, batch=16, fixed=4.0)
    assert share_of(clock.chosen[alone + 5 : together], 0) < 0.1
    assert share_of(clock.chosen[together + 5 :], 0) > 0.8


def test_one_disturbed_step_decides_nothing():
    clock = Clock()
    for _ in range(3):
        clock.run(SETTLING + FIRST_STEPS - 1, 0.9, 0.02)
        clock.run(1, 0.9, 0.02, fixed=50.0)
    clock.run(200, 0.9, 0.02)
    assert share_of(clock.chosen[-100:], N) > 0.9


def test_depth_is_kept_until_it_is_measured():
    chosen = Clock().run(STEPS, 0.4, 0.2).chosen
    edges = [0, *(i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]), len(chosen)]
    runs = [later - earlier for earlier, later in pairwise(edges)]
    assert min(runs[:-1]) >= SETTLING + FIRST_STEPS


@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_fixed_depth_is_what_was_asked_for_whatever_it_costs(num_drafts):
    depth = DraftDepth(num_drafts, is_fixed=True)
    for batch in (1, 9, 200):
        assert depth.choose(batch) == num_drafts
        depth.observe(batch, num_drafts, 100.0, [num_drafts], [0])


def test_nothing_to_guess_with_is_no_depth():
    depth = DraftDepth(0, is_fixed=False)
    assert depth.choose(3) == 0
    depth.observe(3, 0, 1.0, [0] * 3, [0] * 3)
    assert depth.choose(3) == 0


def test_single_guess_is_taken_or_left():
    assert share_of(Clock(1).run(STEPS, 0.9, 0.1).chosen, 1) > 0.9
    assert share_of(Clock(1).run(STEPS, 0.1, 0.9).chosen, 0) > 0.9
