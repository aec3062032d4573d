"""`deepspan convert`: write a checkpoint again in another format, or a small part of it."""

from dataclasses import replace
from pathlib import Path

from deepspan.calibrate import digest_of_examples, input_ranges, read_examples
from deepspan.cli.progress import counting, counting_bytes, notes
from deepspan.cli.sizes import parse_bytes
from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.llm import LLM
from deepspan.weights.convert import Summary, check_apart, earlier_calibration, write
from deepspan.weights.plan import FORMATS, SUBSET, Calibration, check_options, plan
from deepspan.weights.recode import static_modules
from deepspan.weights.source import Source
from deepspan.weights.subset import Subset
from deepspan.weights.table import DraftKind

SHOWN = 3  # names in a remark


def run(
    *,
    source: Path,
    out: Path,
    to: str,
    shard_size: str,
    layers: int | None,
    experts: int | None,
    keep_drafts: bool,
    calibrate: Path | None,
    device: str,
    dtype: str,
) -> None:
    """Raises DeepspanError for anything the user can mend; options are checked before anything is read."""
    shard_bytes = parse_bytes(shard_size, "--shard-size")
    subset = _subset(to, layers, experts, keep_drafts)
    check_options(to, shard_bytes=shard_bytes, subset=subset, is_calibrated=calibrate is not None)
    check_apart(source, out)
    opened = Source(source)
    remarks: list[str] = []
    calibration = None
    if calibrate is not None:
        calibration, remarks = _calibration(opened, out, to, calibrate, device, dtype)
    planned = plan(opened, to, shard_bytes=shard_bytes, subset=subset, calibration=calibration)
    with counting_bytes("converting") as progress:
        done = write(planned, out, progress)
    _tell(replace(done, remarks=[*remarks, *done.remarks]))


def _subset(to: str, layers: int | None, experts: int | None, keep_drafts: bool) -> Subset | None:
    if to == SUBSET:
        if layers is None or experts is None:
            raise ConfigError(f"--to {SUBSET} needs --layers and --experts")
        return Subset(layers=layers, experts=experts, keep_drafts=keep_drafts)
    given = {"--layers": layers is not None, "--experts": experts is not None, "--keep-drafts": keep_drafts}
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"{option} belongs to --to {SUBSET}, found --to {to}")
    return None


def _calibration(
    source: Source, out: Path, to: str, file: Path, device: str, dtype: str
) -> tuple[Calibration, list[str]]:
    """Ranges as an interrupted run has seen them, or seen now; and what to say of layers without one."""
    examples = read_examples(file)
    digest = digest_of_examples(examples)
    modules = static_modules(source, FORMATS[to])
    calibration = earlier_calibration(source.folder, out, digest)
    if calibration is None:
        llm = _load(source, device, dtype)
        with counting("calibrating", "examples") as progress:
            inputs = input_ranges(llm, examples, modules, progress)
        calibration = Calibration(digest=digest, inputs=inputs)
    unseen = [module for module in modules if module not in calibration.inputs]
    if not unseen:
        return calibration, []
    more = f" and {len(unseen) - SHOWN} more" if len(unseen) > SHOWN else ""
    return calibration, [f"no input was seen of {', '.join(unseen[:SHOWN])}{more}: they get a scale per token"]


def _load(source: Source, device: str, dtype: str) -> LLM:
    """The model with its draft stages, if they are of the kind that drafts."""
    method = "dspark" if source.draft_kind is DraftKind.DSPARK else "off"
    engine = EngineConfig(draft_method=method, prefix_caching=False)  # what is found there would not be seen
    with counting("loading", "tensors") as progress:
        return LLM(source.folder, device=device, dtype=dtype, engine=engine, progress=progress)


def _tell(done: Summary) -> None:
    again = f", {done.resumed} of them from an earlier run" if done.resumed else ""
    notes.print(
        f"wrote {done.folder}: {done.tensors:,} tensors ({done.kept:,} as they were) in {done.files:,} files{again}, "
        f"{done.bytes / 1e6:,.1f} MB",
        markup=False,
    )
    if done.not_copied:
        notes.print(f"not copied: {', '.join(done.not_copied)}", markup=False)
    for remark in done.remarks:
        notes.print(f"note: {remark}", markup=False)
