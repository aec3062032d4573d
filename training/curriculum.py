"""What is learnt in which order.

Each stage was found by watching: a network shown everything at once guesses among the objects of a picture for
thousands of steps, while one that first learns to find what a word names goes on quickly (see docs/log.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deepspan.skills.suite import WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """skills: how often each exercise is drawn. network, tower: whether it trains; a tower alone learns from cells.

    dense: attend to every compressed entry, so that the indexer learns from all; otherwise to those it chooses.
    """

    name: str
    steps: int
    skills: Mapping[str, float]
    network: bool = True
    tower: bool = True
    dense: bool = True


CURRICULUM = (
    # What lies under each cell.
    Stage(name="see", steps=3000, skills={"page": 4, "scene": 1, "reading": 0.5}, network=False),
    # To copy what stands in the text.
    Stage(name="copy", steps=600, skills={"repeat": 6, "lookup": 3, "adding": 1, "recall": 0.3}),
    # To find in a picture what a word names.
    Stage(
        name="find",
        steps=900,
        skills={"listing": 3, "colour": 3, "shape": 3, "repeat": 0.7, "lookup": 1, "shuffled": 1},
        tower=False,
    ),
    # To say where it is, how many there are, which of several pictures shows it, and what is written; texts are short,
    # so many of them cost little.
    Stage(
        name="place",
        steps=3000,
        skills={
            "position": 4, "listing": 2, "counting": 2, "strings": 3, "scene": 1, "shape": 0.5, "colour": 0.5,
            "which": 3, "album": 4, "tally": 3, "shuffled": 2, "lookup": 4, "repeat": 0.5, "adding": 3, "recall": 0.7,
        },
        tower=False,
    ),
    # Everything.
    Stage(name="all", steps=6000, skills={**WEIGHTS, "strings": 5, "page": 2, "shuffled": 1}),
    # Everything, as served.
    Stage(name="choose", steps=3000, skills=dict(WEIGHTS), dense=False),
)  # fmt: skip


def chosen_stages(wanted: str, skills: Mapping[str, float] | None) -> tuple[Stage, ...]:
    """`name=steps,name=steps,...` of `CURRICULUM`, all of it if empty. skills: instead of the stages' own.

    Raises ValueError for an unknown name.
    """
    stages: Sequence[Stage] = CURRICULUM
    if wanted:
        known = {stage.name: stage for stage in CURRICULUM}
        pairs = [pair.split("=") for pair in wanted.split(",")]
        if unknown := sorted({name for name, _ in pairs} - set(known)):
            raise ValueError(f"no stage {unknown[0]!r}; stages are {', '.join(known)}")
        stages = [replace(known[name], steps=int(steps)) for name, steps in pairs]
    return tuple(stage if skills is None else replace(stage, skills=skills) for stage in stages)


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of a step; the last one behind the end."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]
