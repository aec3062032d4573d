"""`deepspan inspect weights`: what a checkpoint holds by part of the network, and everything that is wrong with it.

Headers are enough, and so are an index or a configuration where files are missing. Exit code 1 if there are problems.
"""

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from deepspan.bundled import bundled_model
from deepspan.cli.sizes import bytes_text
from deepspan.weights.examine import Examination, examine
from deepspan.weights.inventory import active_parameters

SHOWN = 20  # problems of one kind, unless all are asked for
_TITLES = {
    "files": "from the headers of {}",
    "index": "names from the index of {}, sizes from its configuration",
    "configuration": "expected from the configuration of {}",
}


def show_weights(*, model: Path | None, as_json: bool, all_problems: bool) -> None:
    """Print the table (or JSON) to stdout. Raises ConfigError if there is no configuration to go by."""
    folder = model or bundled_model()
    found = examine(folder)
    if as_json:
        print(json.dumps(_as_record(found), indent=2))
    else:
        _print(found, folder, None if all_problems else SHOWN)
    if found.problems:
        raise typer.Exit(1)


def _as_record(found: Examination) -> dict[str, object]:
    parts = {
        part: {
            "tensors": count.num_tensors,
            "parameters": count.num_parameters,
            "bytes": count.num_bytes,
            "bytes_by_dtype": dict(count.bytes_by_dtype),
        }
        for part, count in found.parts.items()
    }
    return {
        "source": found.source,
        "files": list(found.files),
        "missing_files": list(found.missing_files),
        "parts": parts,
        "total": _totals(found),
        "expected": None if found.expected is None else dict(zip(("tensors", "bytes"), found.expected, strict=True)),
        "left_out": dict(found.left_out),
        "problems": dict(found.problems),
        "remarks": list(found.remarks),
        "quantisation": asdict(found.config.quantisation),
    }


def _totals(found: Examination) -> dict[str, int]:
    return {
        "tensors": sum(count.num_tensors for count in found.parts.values()),
        "parameters": sum(count.num_parameters for count in found.parts.values()),
        "active_parameters": active_parameters(found.parts, found.config),
        "bytes": sum(count.num_bytes for count in found.parts.values()),
    }


def _print(found: Examination, folder: Path, most: int | None) -> None:
    console = Console(highlight=False)
    total = _totals(found)
    table = Table(title=f"weights, {_TITLES[found.source].format(folder.name)}", show_footer=True)
    table.add_column("part", "all", no_wrap=True)
    table.add_column("tensors", f"{total['tensors']:,}", justify="right", no_wrap=True)
    table.add_column("parameters", f"{total['parameters']:,}", justify="right", no_wrap=True)
    table.add_column("bytes", f"{total['bytes']:,}", justify="right", no_wrap=True)
    table.add_column("stored as", bytes_text(total["bytes"]))
    for part, count in found.parts.items():
        dtypes = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in count.bytes_by_dtype.most_common())
        numbers = (count.num_tensors, count.num_parameters, count.num_bytes)
        table.add_row(part, *(f"{number:,}" for number in numbers), dtypes)
    console.print(table)
    for line in _lines(found, total):
        console.print(line, markup=False)
    for kind, messages in found.problems.items():
        console.print(f"{kind}: {len(messages):,}", style="red", markup=False)
        for message in messages[:most]:
            console.print(f"  {message}", markup=False, soft_wrap=True)
        if most is not None and len(messages) > most:
            console.print(f"  and {len(messages) - most:,} more: --all lists them", markup=False)


def _lines(found: Examination, total: dict[str, int]) -> list[str]:
    lines = [f"{total['active_parameters']:,} parameters compute a token of text"]
    if found.files:
        missing = f", {len(found.missing_files)} of them missing" if found.missing_files else ""
        lines.append(f"files: {len(found.files)}{missing}")
    if found.source == "files" and found.expected is not None:
        tensors, num_bytes = found.expected
        if (tensors, num_bytes) == (total["tensors"], total["bytes"]):
            lines.append("as many tensors and bytes as the configuration lets expect")
        else:
            lines.append(f"the configuration lets expect {tensors:,} tensors and {num_bytes:,} bytes")
    lines += [f"tensors that are not loaded: {number:,} ({reason})" for reason, number in found.left_out.items()]
    lines += found.remarks
    if not found.problems:
        lines.append("no problems found")
    return lines
