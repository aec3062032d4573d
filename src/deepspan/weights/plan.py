"""What a conversion will write, planned from headers alone: which tensors in which files, and what stands beside them.

Invariant: the same source and options give the same plan, which is how an interrupted conversion is known again. Called
by `weights.convert`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError
from deepspan.version import __version__
from deepspan.weights.folder import DESCRIBED_STEM, DESCRIPTION_FILE, INDEX_FILE, SUFFIX
from deepspan.weights.quantise import PLAIN, RECIPES, InputRange, Recipe
from deepspan.weights.recode import Part, config_of, description_of, is_own_export, recode
from deepspan.weights.resume import JOURNAL, Identity, source_digest
from deepspan.weights.source import Source
from deepspan.weights.subset import Subset, cut, subset_config, subset_remarks
from deepspan.weights.writer import UNFINISHED, file_bytes

FORMATS = {"bf16": PLAIN, **RECIPES}
SUBSET = "tiny-subset"
TARGETS = (*FORMATS, SUBSET)
DEFAULT_SHARD_BYTES = 5 * 10**9
MAX_COPIED = 64 << 20  # bytes of a file that is copied along
CONFIG_FILE = "config.json"
OPTIONAL_FOLDER = "optional"  # where an export keeps what its description calls optional


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Ranges of inputs that were seen, by module. digest: of what they were seen on."""

    digest: str
    inputs: Mapping[str, InputRange]


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
    def parts(self) -> list[Part]:
        return [part for parts in self.files.values() for part in parts]

    @property
    def num_bytes(self) -> int:
        """Of all data."""
        return sum(part.num_bytes for part in self.parts)

    def disk_bytes(self, files: Sequence[str]) -> int:
        """What these files, and all that stands beside them, take on a disk; small files about."""
        shards = sum(file_bytes(headers_of(self.files[name])) for name in files)
        names = sum(len(name) + 100 for part in self.parts for name in part.headers)  # of index and description
        return shards + names + sum((self.source.folder / name).stat().st_size for name in self.copied)


def headers_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Of all tensors of some parts, by name."""
    return {name: header for part in parts for name, header in part.headers.items()}


def plan(
    source: Source,
    to: str,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    subset: Subset | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """Raises ConfigError naming the option or field, WeightsError naming the tensor, that cannot be."""
    check_options(to, shard_bytes=shard_bytes, subset=subset, is_calibrated=calibration is not None)
    if subset is not None:
        return _plan_subset(source, subset, shard_bytes)
    recipe = FORMATS[to]
    if calibration is not None:
        recipe = replace(recipe, inputs=calibration.inputs)
    ranges = {module: [seen.low, seen.high] for module, seen in recipe.inputs.items()}
    options = {"calibration": calibration.digest if calibration is not None else None, "inputs": ranges}
    return plan_recipe(source, to, recipe, shard_bytes=shard_bytes, options=options)


def check_options(to: str, *, shard_bytes: int, subset: Subset | None, is_calibrated: bool) -> None:
    """Raises ConfigError naming the option of the command that is wrong or does not go with the others."""
    if to not in TARGETS:
        raise ConfigError(f"--to must be one of {', '.join(TARGETS)}, found {to!r}")
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size must be at least 1 byte, found {shard_bytes}")
    if (to == SUBSET) is (subset is None):
        expected = "needs" if subset is None else "belongs to"
        raise ConfigError(f"--to {SUBSET} {expected} --layers and --experts; found --to {to}")
    if is_calibrated and not (to in FORMATS and FORMATS[to].is_described):
        described = ", ".join(name for name, recipe in FORMATS.items() if recipe.is_described)
        raise ConfigError(f"--calibrate is for int8 layers (--to {described}), found --to {to}")


def plan_recipe(
    source: Source,
    to: str,
    recipe: Recipe,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    num_files: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The checkpoint in the formats of a recipe, in files of at most a size, or in a number of them."""
    parts = recode(source, recipe)
    files = _packed(parts, shard_bytes) if num_files is None else _dealt(parts, num_files)
    description, remarks = None, []
    if recipe.is_described:
        description = description_of(source, _labels(parts), is_own=is_own_export(source, recipe))
    elif (source.metadata.get("optional") or {}).get("quarot"):
        remarks.append("the residual stream of the source is rotated, and stays so; nothing in the new format says it")
    return _plan(source, to, files, config_of(source, recipe), description, remarks, options or {})


def _plan_subset(source: Source, subset: Subset, shard_bytes: int) -> Plan:
    parts = cut(source, subset)
    description = description_of(source, _labels(parts), is_own=True) if source.is_described else None
    options: dict[str, Any] = {"layers": subset.layers, "experts": subset.experts, "keep_drafts": subset.keep_drafts}
    remarks = subset_remarks(source, subset)
    files = _packed(parts, shard_bytes)
    return _plan(source, SUBSET, files, subset_config(source, subset), description, remarks, options)


def _labels(parts: Sequence[Part]) -> dict[str, str]:
    return {name: label for part in parts for name, label in part.labels.items()}


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
        file: [[name, header.dtype, header.shape] for name, header in headers_of(parts).items()]
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
