"""`deepspan eval tiny`: the accuracy table of a model on the skills of deepspan-tiny."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspan.cli.draft_report import DraftCounts, one_line
from deepspan.cli.generate import load
from deepspan.cli.options import DraftOptions
from deepspan.cli.progress import counting, notes
from deepspan.config.engine import EngineConfig
from deepspan.evaluate import Score, evaluate


def run(
    *,
    model: Path | None,
    questions: int,
    as_json: bool,
    failures: bool,
    device: str,
    dtype: str,
    drafts: DraftOptions,
) -> None:
    """Print the table (or JSON) to stdout, progress to stderr."""
    llm = load(model, device=device, dtype=dtype, engine=EngineConfig(**drafts.engine_fields()))
    with counting("asking", "questions") as progress:
        scores = evaluate(llm, questions, progress=progress)
    if as_json:
        print(json.dumps({s.skill: {"right": s.num_right, "asked": s.num_asked} for s in scores}, indent=2))
    else:
        Console().print(_table(scores))
    if (rates := DraftCounts.of_stats(llm.stats).rates()) is not None:
        notes.print(f"guesses: {one_line(rates)}", markup=False)
    if failures:
        for score in scores:
            for question, right, given in score.failures:
                notes.print(f"{score.skill}: {question!r} is {right!r}, answered {given!r}", markup=False)


def _table(scores: list[Score]) -> Table:
    table = Table(title="exact answers on held-out seeds")
    table.add_column("skill")
    for column in ("right", "asked", "accuracy"):
        table.add_column(column, justify="right")
    for score in scores:
        table.add_row(score.skill, str(score.num_right), str(score.num_asked), f"{score.accuracy:.1%}")
    return table
