"""Converting a checkpoint: what is to be written is planned from headers alone, then written a piece at a time.

Output is a checkpoint with original names in numbered files of a chosen size, an index, the configuration of the new
format, and the tokenizer and other small files as they were. Invariants: the same source and options give the same
bytes, interrupted or not; `config.json` comes last, so that nothing unfinished can be loaded; memory is bounded by a few
of the largest tensors. Called by `deepspan convert`; `quantise.write_quantised` shares all of it but resuming.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError, WeightsError
from deepspan.version import __version__
from deepspan.weights.folder import DESCRIBED_STEM, DESCRIPTION_FILE, INDEX_FILE, SUFFIX
from deepspan.weights.quantise import PLAIN, RECIPES, InputRange, Recipe
from deepspan.weights.recode import Part, config_of, description_of, is_own_export, recode
from deepspan.weights.resume import JOURNAL, Identity, Journal, check_room, locked, source_digest
from deepspan.weights.source import Source
from deepspan.weights.subset import Subset, cut, subset_config
from deepspan.weights.writer import UNFINISHED, ShardWriter, sync_folder, write_index, write_json

FORMATS = {"bf16": PLAIN, **RECIPES}
SUBSET = "tiny-subset"
TARGETS = (*FORMATS, SUBSET)
DEFAULT_SHARD_BYTES = 5 * 10**9
MAX_COPIED = 64 << 20  # bytes of a file that is copied along
CONFIG_FILE = "config.json"
OPTIONAL_FOLDER = "optional"  # where an export keeps what its description calls optional

Progress = Callable[[int, int], None]  # tensors written, tensors in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checkpoint to be written. files: name -> parts. copied: small files of the source, by relative name.

    identity: see `Journal`. remarks: what a user should know. not_copied: entries of the source that stay behind.
    """

    source: Source
    to: str
    files: Mapping[str, Sequence[Part]]
    config: Mapping[str, Any]
    description: Mapping[str, Any] | None
    index_file: str
    copied: Sequence[str]
    not_copied: Sequence[str]
    remarks: Sequence[str]
    identity: Identity

    @property
    def num_tensors(self) -> int:
        return sum(len(part.headers) for parts in self.files.values() for part in parts)

    @property
    def num_bytes(self) -> int:
        """Of all data."""
        return sum(part.num_bytes for parts in self.files.values() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was done. resumed: files that an earlier run had finished."""

    folder: str
    to: str
    tensors: int
    bytes: int
    files: int
    resumed: int
    not_copied: Sequence[str]
    remarks: Sequence[str]


def convert(
    source: Path,
    folder: Path,
    to: str,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    subset: Subset | None = None,
    inputs: Mapping[str, InputRange] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write the checkpoint `source` to `folder` in another format, going on with what an interrupted run has left.

    to: one of `TARGETS`. subset: for `tiny-subset`. inputs: by module, ranges of inputs of layers that get static int8.
    Raises ConfigError or WeightsError naming the option, file or tensor at fault.
    """
    check_apart(source, folder)
    return write(plan(Source(source), to, shard_bytes=shard_bytes, subset=subset, inputs=inputs), folder, progress)


def replace_by(source: Path, folder: Path, recipe: Recipe) -> Path:
    """Write a checkpoint in the formats of a recipe, in as many files as it has, in the place of what `folder` holds."""
    check_apart(source, folder)
    opened = Source(source)
    opened.check_offsets()
    planned = _plan_recipe(opened, "", recipe, num_files=len(opened.checkpoint.files))
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}.index.json"), folder / DESCRIPTION_FILE):
        stale.unlink(missing_ok=True)
    for name, parts in planned.files.items():
        _write_file(folder / name, parts, lambda count: None, seal=lambda digest: None)
    _write_beside(planned, folder)
    return folder


def check_apart(source: Path, folder: Path) -> None:
    """Raises WeightsError if one is the other."""
    if source.resolve() == folder.resolve():
        raise WeightsError(f"{folder} is the checkpoint to convert; it cannot be written over while it is read")


# --- planning


def plan(
    source: Source,
    to: str,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    subset: Subset | None = None,
    inputs: Mapping[str, InputRange] | None = None,
) -> Plan:
    """From headers alone. Raises ConfigError or WeightsError as `convert` does."""
    if to not in TARGETS:
        raise ConfigError(f"--to must be one of {', '.join(TARGETS)}, found {to!r}")
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size must be at least 1 byte, found {shard_bytes}")
    if to != SUBSET:
        recipe = FORMATS[to]
        if inputs:
            recipe = replace(recipe, inputs=inputs)
        return _plan_recipe(source, to, recipe, shard_bytes=shard_bytes)
    if subset is None:
        raise ConfigError(f"--to {SUBSET} needs --layers and --experts")
    parts = cut(source, subset)
    labels = {name: label for part in parts for name, label in part.labels.items()}
    description = description_of(source, labels, is_own=True) if source.is_described else None
    remarks = []
    if source.num_stages and not subset.keep_drafts:
        remarks.append(f"{source.num_stages} draft stages are left out (--keep-drafts keeps them)")
    options: dict[str, Any] = {"layers": subset.layers, "experts": subset.experts, "keep_drafts": subset.keep_drafts}
    return _plan(
        source, to, _packed(parts, shard_bytes), subset_config(source, subset), description, remarks, options
    )  # fmt: skip


def _plan_recipe(
    source: Source, to: str, recipe: Recipe, *, shard_bytes: int = DEFAULT_SHARD_BYTES, num_files: int | None = None
) -> Plan:
    parts = recode(source, recipe)
    files = _packed(parts, shard_bytes) if num_files is None else _dealt(parts, num_files)
    description, remarks = None, []
    if recipe.is_described:
        labels = {name: label for part in parts for name, label in part.labels.items()}
        description = description_of(source, labels, is_own=is_own_export(source, recipe))
    elif (source.metadata.get("optional") or {}).get("quarot"):
        remarks.append("the residual stream of the source is rotated, and stays so; nothing in the new format says it")
    options = {"inputs": {module: [seen.low, seen.high] for module, seen in recipe.inputs.items()}}
    return _plan(source, to, files, config_of(source, recipe), description, remarks, options)


def _plan(
    source: Source,
    to: str,
    files: Sequence[Sequence[Part]],
    config: dict[str, Any],
    description: dict[str, Any] | None,
    remarks: Sequence[str],
    options: Mapping[str, Any],
) -> Plan:
    parse_model_config(config)  # nothing is written that could not be read
    stem, index = "model", INDEX_FILE
    if description is not None:
        stem, index = DESCRIBED_STEM, f"{DESCRIBED_STEM}{SUFFIX}.index.json"
    named = {f"{stem}-{number:05d}-of-{len(files):05d}{SUFFIX}": parts for number, parts in enumerate(files, start=1)}
    copied, not_copied = _beside(source.folder, with_optional=description is not None)
    headers = {
        file: [[name, header.dtype, header.shape] for part in parts for name, header in part.headers.items()]
        for file, parts in named.items()
    }
    text = json.dumps([headers, config, description])
    identity = {
        "format": to,
        "source": source_digest(source.folder),
        "version": __version__,
        **options,
        "layout of files": hashlib.sha256(text.encode()).hexdigest(),
    }
    return Plan(
        source=source, to=to, files=named, config=config, description=description, index_file=index, copied=copied,
        not_copied=not_copied, remarks=remarks, identity=identity,
    )  # fmt: skip


def _packed(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Parts in order, in files of at most `limit` bytes; one that is larger has a file to itself."""
    files: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if files[-1] and size + part.num_bytes > limit:
            files.append([])
            size = 0
        files[-1].append(part)
        size += part.num_bytes
    return files


def _dealt(parts: Sequence[Part], num_files: int) -> list[list[Part]]:
    """Parts in order, in `num_files` files of about the same size; none is empty if there are as many parts."""
    files: list[list[Part]] = [[]]
    size, left = 0, sum(part.num_bytes for part in parts)
    for index, part in enumerate(parts):
        files_left = num_files - len(files)
        is_full = size * (files_left + 1) >= left or len(parts) - index <= files_left
        if files[-1] and files_left and is_full:
            files.append([])
            left, size = left - size, 0
        files[-1].append(part)
        size += part.num_bytes
    return files


def _beside(folder: Path, *, with_optional: bool) -> tuple[list[str], list[str]]:
    """Names of what is copied along, and of what is not though it is no part of the weights."""
    copied, not_copied = [], []
    for entry in sorted(folder.iterdir()):
        name = entry.name
        if name in (CONFIG_FILE, DESCRIPTION_FILE, JOURNAL) or name.endswith((SUFFIX, f"{SUFFIX}.index.json")):
            continue
        if entry.is_file() and entry.stat().st_size <= MAX_COPIED and not name.endswith(UNFINISHED):
            copied.append(name)
        elif entry.is_dir() and name == OPTIONAL_FOLDER and with_optional:
            copied += [f"{name}/{file.name}" for file in sorted(entry.iterdir()) if file.is_file()]
        else:
            not_copied.append(name)
    return copied, not_copied


# --- writing


def write(planned: Plan, folder: Path, progress: Progress | None = None) -> Summary:
    """Raises WeightsError if the folder cannot be written, or is in use; what is finished stays for the next run."""
    beside = {CONFIG_FILE, DESCRIPTION_FILE, planned.index_file, *(Path(name).parts[0] for name in planned.copied)}
    known = {*planned.files, *beside}
    is_begun = bool(Journal(folder, planned.identity, known).finished)
    check_room(folder, 0 if is_begun else planned.num_bytes, planned.num_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            journal = Journal(folder, planned.identity, known)  # read again: another run may have ended just now
            return _write(planned, folder, journal, progress or (lambda done, total: None))
    except OSError as error:
        raise WeightsError(
            f"{folder} cannot be written: {error.strerror}; what is finished is kept, run the same command to go on"
        ) from None


def _write(planned: Plan, folder: Path, journal: Journal, progress: Progress) -> Summary:
    finished = journal.verify(planned.files)
    rest = {name: parts for name, parts in planned.files.items() if name not in finished}
    check_room(folder, sum(part.num_bytes for parts in rest.values() for part in parts), planned.num_bytes)
    planned.source.check_offsets()
    journal.begin()
    done, total = 0, planned.num_tensors

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    count(sum(len(part.headers) for name in finished for part in planned.files[name]))
    for name, parts in rest.items():
        _write_file(folder / name, parts, count, seal=lambda digest, name=name: journal.record(name, digest))
        sync_folder(folder)
    _write_beside(planned, folder)
    journal.end()
    return Summary(
        folder=str(folder), to=planned.to, tensors=total, bytes=planned.num_bytes, files=len(planned.files),
        resumed=len(finished), not_copied=planned.not_copied, remarks=planned.remarks,
    )  # fmt: skip


def _write_file(
    file: Path, parts: Sequence[Part], count: Callable[[int], None], *, seal: Callable[[str], None]
) -> None:
    headers = {name: header for part in parts for name, header in part.headers.items()}
    with ShardWriter(file, headers) as writer:
        for part in parts:
            for name, tensor in part.make().items():
                writer.write(name, tensor)
            count(len(part.headers))
        seal(writer.seal())
        writer.publish()


def _write_beside(planned: Plan, folder: Path) -> None:
    """All that is not weights; the configuration last."""
    for name in planned.copied:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(planned.source.folder / name, target.with_name(target.name + UNFINISHED))
        target.with_name(target.name + UNFINISHED).replace(target)
    if planned.description is not None:
        write_json(folder / DESCRIPTION_FILE, planned.description, durable=True)
    weight_map = {
        name: file for file, parts in planned.files.items() for part in parts for name in part.headers
    }  # fmt: skip
    write_index(folder / planned.index_file, weight_map, planned.num_bytes)
    write_json(folder / CONFIG_FILE, planned.config, durable=True)
