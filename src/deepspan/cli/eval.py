"""`deepspan eval tiny`: accuracy of a model on the skills of deepspan-tiny, as it is or in several formats."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from deepspan.bundled import bundled_model
from deepspan.cli.draft_report import DraftCounts, one_line
from deepspan.cli.generate import load
from deepspan.cli.options import DraftOptions
from deepspan.cli.progress import counting, notes
from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.evaluate import EVALUATED, Score, evaluate
from deepspan.llm import LLM
from deepspan.weights.folder import Headers
from deepspan.weights.load import FLOAT_DTYPES, INTEGER_DTYPES
from deepspan.weights.quantise import RECIPES, write_quantised

PLAIN = "bf16"  # the checkpoint as it is
_AS_IT_IS = ""


def run(
    *,
    model: Path | None,
    questions: int,
    skills: str | None,
    formats: str | None,
    as_json: bool,
    failures: bool,
    device: str,
    dtype: str,
    drafts: DraftOptions,
) -> None:
    """Print the table (or JSON) to stdout, progress to stderr.

    formats: separated by commas; the checkpoint is quantised to each in a temporary folder. Raises ConfigError for a
    format or skill that does not exist, WeightsError if the checkpoint cannot be quantised.
    """
    asked = _listed("skills", skills, EVALUATED) if skills is not None else EVALUATED
    names = _listed("formats", formats, (PLAIN, *RECIPES)) if formats is not None else (_AS_IT_IS,)
    folder = model or bundled_model()
    if formats is not None:
        _check_plain(folder)
    engine = EngineConfig(**drafts.engine_fields())
    found: dict[str, list[Score]] = {}
    for name in names:
        with TemporaryDirectory() as scratch:
            packed = write_quantised(folder, Path(scratch), RECIPES[name]) if name in RECIPES else folder
            found[name] = _answered(load(packed, device=device, dtype=dtype, engine=engine), questions, asked, name)
    if as_json:
        records = {name: _record(scores) for name, scores in found.items()}
        print(json.dumps(records if formats is not None else records[_AS_IT_IS], indent=2))
    elif formats is not None:
        _print_formats(found)
    else:
        Console().print(_table(found[_AS_IT_IS]))
    if failures:
        _show_failures(found)


def _answered(llm: LLM, questions: int, skills: Sequence[str], name: str) -> list[Score]:
    """The scores; on stderr how well tokens were guessed, if they were."""
    with counting(f"asking {name}".strip(), "questions") as progress:
        scores = evaluate(llm, questions, skills=skills, progress=progress)
    if (rates := DraftCounts.of_stats(llm.stats).rates()) is not None:
        notes.print(f"{name} guesses: {one_line(rates)}".strip(), markup=False)
    return scores


def _listed(what: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"--{what} takes {', '.join(known)}, separated by commas; found {name!r}")
        if names.count(name) > 1:
            raise ConfigError(f"--{what} names {name} {names.count(name)} times")
    return names


def _check_plain(folder: Path) -> None:
    for name, stored in Headers(folder).tensors.items():
        if stored.dtype not in FLOAT_DTYPES | INTEGER_DTYPES:
            raise ConfigError(
                f"--formats needs a checkpoint that is not quantised, {name} in {folder} is stored as {stored.dtype}"
            )


def _record(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    return {s.skill: {"right": s.num_right, "asked": s.num_asked} for s in scores}


def _table(scores: Sequence[Score]) -> Table:
    table = Table(title="exact answers on held-out seeds")
    table.add_column("skill")
    for column in ("right", "asked", "accuracy"):
        table.add_column(column, justify="right")
    for score in scores:
        table.add_row(score.skill, str(score.num_right), str(score.num_asked), f"{score.accuracy:.1%}")
    return table


def _print_formats(found: Mapping[str, Sequence[Score]]) -> None:
    """A column of each format, a row of each skill; under it what the formats lose against the first."""
    first, *others = found
    table = Table(title="exact answers on held-out seeds, by format", show_footer=True)
    table.add_column("skill", "all")
    table.add_column("asked", str(sum(score.num_asked for score in found[first])), justify="right")
    for name, scores in found.items():
        table.add_column(name, f"{_accuracy(scores):.1%}", justify="right")
    for row in zip(*found.values(), strict=True):
        table.add_row(row[0].skill, str(row[0].num_asked), *(f"{score.accuracy:.1%}" for score in row))
    console = Console(highlight=False)
    console.print(table)
    for name in others:
        points = 100 * (_accuracy(found[name]) - _accuracy(found[first]))
        console.print(f"{name}: {points:+.1f} points against {first}", markup=False)


def _accuracy(scores: Sequence[Score]) -> float:
    """Over all questions: a skill of few questions says little by itself."""
    return sum(score.num_right for score in scores) / sum(score.num_asked for score in scores)


def _show_failures(found: Mapping[str, Sequence[Score]]) -> None:
    for name, scores in found.items():
        label = f"{name} " if name != _AS_IT_IS else ""
        for score in scores:
            for question, right, given in score.failures:
                notes.print(f"{label}{score.skill}: {question!r} is {right!r}, answered {given!r}", markup=False)
