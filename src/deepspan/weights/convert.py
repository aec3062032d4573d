"""Converting a checkpoint to another format, or to a small part of it: what is planned is written a piece at a time.

Output is a checkpoint with original names in numbered files of a chosen size, an index, the configuration of the new
format, and the tokenizer and other small files as they were. Invariants: the same source and options give the same
bytes, interrupted or not; `config.json` comes last, so that nothing unfinished can be loaded; memory is bounded by a
few of the largest tensors. Called by `deepspan convert`; `quantise.write_quantised` shares all of it but resuming.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspan.errors import WeightsError
from deepspan.weights.folder import DESCRIPTION_FILE, SUFFIX
from deepspan.weights.plan import CONFIG_FILE, DEFAULT_SHARD_BYTES, Calibration, Plan, headers_of, plan, plan_recipe
from deepspan.weights.quantise import InputRange, Recipe
from deepspan.weights.recode import Part
from deepspan.weights.resume import Journal, check_room, locked, read_journal, source_digest
from deepspan.weights.source import Source
from deepspan.weights.subset import Subset
from deepspan.weights.writer import UNFINISHED, ShardWriter, sync_folder, write_index, write_json

Progress = Callable[[int, int], None]  # bytes of data written, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was done. bytes: of data. kept: tensors copied byte by byte. resumed: files an earlier run had finished."""

    folder: Path
    tensors: int
    kept: int
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
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write the checkpoint `source` to `folder` in another format, going on with what an interrupted run has left.

    to: one of `TARGETS`. subset: for `tiny-subset`. calibration: layers named in it become static int8.
    Raises ConfigError or WeightsError naming the option, file or tensor at fault.
    """
    check_apart(source, folder)
    planned = plan(Source(source), to, shard_bytes=shard_bytes, subset=subset, calibration=calibration)
    return write(planned, folder, progress)


def replace_by(source: Path, folder: Path, recipe: Recipe) -> Path:
    """Write a checkpoint in the formats of a recipe, in as many files as it has, over what `folder` holds."""
    check_apart(source, folder)
    opened = Source(source)
    opened.check_offsets()
    planned = plan_recipe(opened, "", recipe, num_files=len(opened.checkpoint.files))
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


def earlier_calibration(source: Path, folder: Path, digest: str) -> Calibration | None:
    """Ranges that an interrupted conversion of the same source has seen on the same prompts, or None.

    Raises WeightsError if the journal of the folder cannot be read.
    """
    found = read_journal(folder)
    if found is None or found["identity"].get("calibration") != digest:
        return None
    if found["identity"].get("source") != source_digest(source):
        return None
    ranges = found["identity"]["inputs"]
    return Calibration(
        digest=digest, inputs={module: InputRange(low=low, high=high) for module, (low, high) in ranges.items()}
    )


def write(planned: Plan, folder: Path, progress: Progress | None = None) -> Summary:
    """Raises WeightsError if the folder cannot be written, or is in use; what is finished stays for the next run."""
    beside = {CONFIG_FILE, DESCRIPTION_FILE, planned.index_file, *(Path(name).parts[0] for name in planned.copied)}
    known = {*planned.files, *beside}
    is_new = not Journal(folder, planned.identity, known).finished
    if is_new:  # before anything is made; with finished files it is known only when they were looked at
        check_room(folder, planned.disk_bytes(list(planned.files)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            journal = Journal(folder, planned.identity, known)  # read again: another run may have ended just now
            return _write(planned, folder, journal, progress or (lambda done, total: None))
    except OSError as error:
        where = error.filename or folder
        raise WeightsError(
            f"{where}: {error.strerror or error}; files that are finished are kept, run the same command to go on"
        ) from None


def _write(planned: Plan, folder: Path, journal: Journal, progress: Progress) -> Summary:
    done, total = 0, planned.num_bytes

    def count(parts: Sequence[Part]) -> None:
        nonlocal done
        done += sum(part.num_bytes for part in parts)
        progress(done, total)

    finished = journal.verify(planned.files, lambda name: count(planned.files[name]))
    rest = [name for name in planned.files if name not in finished]
    check_room(folder, planned.disk_bytes(rest), journal.reclaimed())
    planned.source.check_offsets()
    journal.begin()
    for name in rest:
        _write_file(
            folder / name, planned.files[name], count, seal=lambda digest, name=name: journal.record(name, digest)
        )  # fmt: skip
        sync_folder(folder)
    _write_beside(planned, folder)
    journal.end()
    return Summary(
        folder=folder,
        tensors=sum(len(part.headers) for part in planned.parts),
        kept=sum(len(part.headers) for part in planned.parts if part.is_kept),
        bytes=total,
        files=len(planned.files),
        resumed=len(finished),
        not_copied=planned.not_copied,
        remarks=planned.remarks,
    )


def _write_file(
    file: Path, parts: Sequence[Part], count: Callable[[Sequence[Part]], None], *, seal: Callable[[str], None]
) -> None:
    """seal: called with the digest of the whole file before it gets its name."""
    with ShardWriter(file, headers_of(parts)) as writer:
        for part in parts:
            for name, tensor in part.make().items():
                writer.write(name, tensor)
            count([part])
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
    weight_map = {name: file for file, parts in planned.files.items() for name in headers_of(parts)}
    write_index(folder / planned.index_file, weight_map, planned.num_bytes)
    write_json(folder / CONFIG_FILE, planned.config, durable=True)
