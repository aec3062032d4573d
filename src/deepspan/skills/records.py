"""What an exercise is: pictures, then questions with their exact answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deepspan.skills.pictures import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question. skill: what it tests, the row of the accuracy table that it counts for."""

    question: str
    answer: str
    skill: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation. images: all come before the first question, in this order. turns: at least one."""

    images: tuple[Scene, ...]
    turns: tuple[Turn, ...]

    def only(self, index: int) -> "Sample":
        """The same pictures with a single question, so that no earlier answer helps.

        In text exercises whose first question holds the material, only index 0 stands on its own.
        """
        return replace(self, turns=(self.turns[index],))


Skill = Callable[[np.random.Generator], Sample]
