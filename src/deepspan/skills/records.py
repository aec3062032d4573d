"""What an exercise is: pictures, then questions with their exact answers; and how it is said as a chat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepspan.skills.pictures import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question. skill: what it tests, the row of the accuracy table that it counts for.

    sentence: the answer as a whole sentence, "" where there is none.
    """

    question: str
    answer: str
    skill: str
    sentence: str = ""


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


def messages_of(item: Sample, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Chat messages of a sample: the pictures stand before the first question."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(item.turns):
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images] if index == 0 else []
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


Skill = Callable[[np.random.Generator], Sample]
