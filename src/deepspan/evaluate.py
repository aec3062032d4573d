"""How well a model does the skills: exact answers on held-out seeds, through the same path that serves requests.

Every question of a picture is asked alone, so that no earlier answer helps. Greedy, in batches. Called by
`deepspan eval` and by the ablations of the training scripts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspan.core.sampling import SamplingParams
from deepspan.llm import LLM
from deepspan.skills.pictures import draw
from deepspan.skills.records import Sample, messages_of
from deepspan.skills.suite import EVAL_SEED, PICTURE_SKILLS, sample

EVALUATED = (
    *("reading", "colour", "shape", "position", "counting", "which"),
    *("sentence", "series"),
    *("repeat", "lookup", "adding", "recall", "recall_600", "recall_2k", "recall_4k", "recall_8k"),
)
LONG = {"recall_2k": 4, "recall_4k": 16, "recall_8k": 40}  # how many times fewer of these are asked
BATCH_TOKENS = 4096
MAX_ANSWER_TOKENS = 60

Progress = Callable[[int, int], None]  # questions done, questions in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One row of the table. failures: the first few (question, right answer, given answer)."""

    skill: str
    num_right: int
    num_asked: int
    failures: tuple[tuple[str, str, str], ...]

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A question of a skill that stands on its own."""

    skill: str
    sample: Sample


def evaluate(
    llm: LLM, per_skill: int, *, skills: Sequence[str] = EVALUATED, progress: Progress | None = None
) -> list[Score]:
    """Ask `per_skill` questions of each skill (fewer of the long ones, at least one) and compare answers exactly.

    Raises KeyError for an unknown skill.
    """
    exercises = [exercise for skill in skills for exercise in held_out(skill, max(1, per_skill // LONG.get(skill, 1)))]
    given: list[str] = []
    for batch in _batches(exercises):
        outputs = llm.chat_many([question_of(e.sample) for e in batch], SamplingParams(max_tokens=MAX_ANSWER_TOKENS))
        given += [output.text for output in outputs]
        if progress is not None:
            progress(len(given), len(exercises))
    return [_score(skill, exercises, given) for skill in skills]


def held_out(skill: str, count: int) -> list[Exercise]:
    """The first `count` questions of the held-out seed that stand on their own."""
    found: list[Exercise] = []
    for index in range(count):
        item = sample(EVAL_SEED, index, skill)
        num_alone = len(item.turns) if skill in PICTURE_SKILLS else 1
        # One question of each picture in turn: many pictures say more than many questions about one.
        found.append(Exercise(skill=skill, sample=item.only((index + 1) % num_alone)))
    return found


def _batches(exercises: Sequence[Exercise]) -> list[list[Exercise]]:
    batches: list[list[Exercise]] = [[]]
    room = BATCH_TOKENS
    for exercise in exercises:
        cost = 150 * len(exercise.sample.images) + len(exercise.sample.turns[0].question) // 3
        if room < cost and batches[-1]:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(exercise)
        room -= cost
    return batches


def question_of(item: Sample) -> list[dict[str, Any]]:
    """The question alone, without its answer."""
    return messages_of(item, [draw(scene) for scene in item.images])[:1]


def _score(skill: str, exercises: Sequence[Exercise], given: Sequence[str]) -> Score:
    asked = [(e.sample.turns[0], answer) for e, answer in zip(exercises, given, strict=True) if e.skill == skill]
    wrong = [(turn.question[-80:], turn.answer, answer) for turn, answer in asked if answer != turn.answer]
    return Score(skill=skill, num_right=len(asked) - len(wrong), num_asked=len(asked), failures=tuple(wrong[:5]))
