"""The files of a checkpoint folder, by their headers: index, shards, tensors, and all that does not fit together.

Works on a folder that is still being downloaded: what is there is read, what is missing is a problem. Invariant: a
folder without problems has every stored name in exactly one complete file, and an index that agrees. Data is never
read, torch never imported. Used by `weights.checkpoint` to load and by `weights.inventory` to look.
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspan.errors import WeightsError
from deepspan.weights.header import START_BYTES, StoredTensor, lfs_problem, read_header

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
DESCRIPTION_FILE = "quant_model_description.json"  # says that the weights were exported by ModelSlim
DESCRIBED_STEM = "quant_model_weights"
SUFFIX = ".safetensors"
MAX_PROBLEMS_IN_MESSAGE = 8
_NUMBERED = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".tmp", ".download")


class StoredTensors:
    """Headers of stored tensors, by stored name, over which it iterates. folder: where the checkpoint is."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder, self.tensors = folder, tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


class Headers(StoredTensors):
    """Headers of all files of a folder.

    tensors: stored name -> header, of files that are there. index: stored name -> file name, or None for a folder
    without one. files: those that belong to the checkpoint; missing: those of them that are not there.
    problems: a message each, naming file and tensor. extras: files that nothing names; they are not read.
    described: whether it is an export with a description. total_size: bytes of all data as the index states them,
    which nothing relies on.
    """

    def __init__(self, folder: str | Path) -> None:
        """Never raises for what is wrong with the files; `require` does."""
        super().__init__(Path(folder), {})
        self.problems: list[str] = []
        self.described = described = (self.folder / DESCRIPTION_FILE).exists()
        # An export keeps the index of its source beside its own: that one is stale.
        self.index_file = f"{DESCRIBED_STEM}.safetensors.index.json" if described else INDEX_FILE
        self.total_size: int | None = None
        self.index = self._read_index()
        self.files = self._find_files(f"{DESCRIBED_STEM}*{SUFFIX}" if described else None)
        self.missing = [file for file in self.files if not file.exists()]
        self.extras = sorted(set(self.folder.glob(f"*{SUFFIX}")) - set(self.files))
        self._broken: set[str] = set()
        self._name_missing()
        for file in self.files:
            if file not in self.missing:
                self._read(file)
        self._compare_with_index()

    def require(self) -> None:
        """Raises WeightsError with the first problems, if there are any; warns of files that nothing names."""
        if self.problems:
            more = len(self.problems) - MAX_PROBLEMS_IN_MESSAGE
            shown = "; ".join(self.problems[:MAX_PROBLEMS_IN_MESSAGE])
            raise WeightsError(f"{shown}; and {more} problems more" if more > 0 else shown)
        for file in self.extras:
            log.warning("%s is not named by %s and is not read", file.name, self.index_file)

    # --- which files

    def _read_index(self) -> dict[str, str] | None:
        file = self.folder / self.index_file
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(f"{file.name} cannot be read: {error.strerror}")
            return {}
        if problem := lfs_problem(file.name, data[:START_BYTES]):
            self.problems.append(problem)
            return {}
        try:
            raw = json.loads(data.decode("utf-8"), object_pairs_hook=_tensor_placed_once)
            index = raw["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = str(error) if type(error) is ValueError else repr(error)
            self.problems.append(f"{file} is not a safetensors index: {why}")
            return {}
        if problem := _map_problem(index):
            self.problems.append(f"{file}: {problem}")
            return {}
        metadata = raw.get("metadata")
        total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
        self.total_size = total_size if type(total_size) is int else None
        return index

    def _find_files(self, shards: str | None) -> list[Path]:
        """shards: pattern of files that belong together even without an index."""
        if self.index is not None:
            files = [self.folder / name for name in sorted(set(self.index.values()))]
            self.problems += _mixed_totals(self.index_file, files)
            return files
        if shards is not None and (files := sorted(self.folder.glob(shards))):
            self.problems += _mixed_totals(str(self.folder), files)
            if left_out := _left_out(files):
                self.problems.append(f"{left_out[0]}{_and_more(len(left_out) - 1)} is missing from {self.folder}")
            return files
        files = sorted(self.folder.glob(f"*{SUFFIX}"))
        if not files:
            unfinished = _unfinished(self.folder)
            self.problems.append(f"no safetensors files in {self.folder}{_begun(unfinished)}")
        elif len(files) > 1:
            names = ", ".join(file.name for file in files[:3])
            self.problems.append(
                f"{self.folder} has {len(files)} safetensors files ({names}, ...) but no {self.index_file}"
            )
        elif left_out := _left_out(files):
            self.problems.append(
                f"{files[0].name} is the only file in {self.folder}, there is no {self.index_file}, and "
                f"{left_out[0]}{_and_more(len(left_out) - 1)} is missing"
            )
        return files

    def _name_missing(self) -> None:
        if not self.missing:
            return
        assert self.index is not None, "files without an index were found in the folder"
        placed: dict[str, list[str]] = {}
        for key, name in self.index.items():
            placed.setdefault(name, []).append(key)
        unfinished = _unfinished(self.folder)
        extras = ", ".join(file.name for file in self.extras[:3])
        beside = f"; {extras} is there and not named by the index" if extras else ""
        for number, file in enumerate(self.missing):
            keys = placed[file.name]
            # Said once: it is the same for all of them.
            hints = f"{_begun(unfinished)}{beside}" if number == 0 else ""
            self.problems.append(
                f"{file.name} is missing from {self.folder}: {self.index_file} places {len(keys):,} tensors there, "
                f"{keys[0]} first{hints}"
            )

    # --- what they hold

    def _read(self, file: Path) -> None:
        header = read_header(file)
        self.problems += header.problems
        if header.problems:
            self._broken.add(file.name)
        for key, stored in header.tensors.items():
            if key in self.tensors:
                self.problems.append(f"tensor {key} is in {self.tensors[key].file.name} and again in {file.name}")
            else:
                self.tensors[key] = stored

    def _compare_with_index(self) -> None:
        """Broken and missing files have been named already; what they lack is not listed again."""
        if self.index is None:
            return
        silent = self._broken | {file.name for file in self.missing}
        for key, name in self.index.items():
            if key not in self.tensors:
                if name not in silent:
                    self.problems.append(f"{self.index_file} places tensor {key} in {name}, which does not hold it")
            elif (found := self.tensors[key].file.name) != name:
                self.problems.append(f"{self.index_file} places tensor {key} in {name}, it is in {found}")
        for key, stored in self.tensors.items():
            if key not in self.index:
                self.problems.append(f"tensor {key} of {stored.file.name} is not in {self.index_file}")


def _tensor_placed_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    places: dict[str, Any] = {}
    for name, value in pairs:
        if places.setdefault(name, value) != value:
            raise ValueError(f"it places {name} in {places[name]!r} and in {value!r}")
    return places


def _map_problem(index: Any) -> str | None:
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        return "weight_map must map tensor names to file names"
    if not index:
        return "weight_map is empty, expected the file name of every tensor"
    for key, name in index.items():
        if not name.endswith(SUFFIX) or "/" in name or "\\" in name:
            return f"weight_map places {key} in {name!r}, expected the name of a {SUFFIX} file of the same folder"
    return None


def _mixed_totals(who: str, files: list[Path]) -> list[str]:
    """Files of one stem whose names count different totals (`-of-00046` and `-of-00048`) come from two releases."""
    examples: dict[str, dict[str, list[str]]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            examples.setdefault(match[1], {}).setdefault(match[3], []).append(file.name)
    return [
        f"{who} names files of {len(totals)} releases: "
        + ", ".join(f"{len(names)} of {int(total)} such as {names[0]}" for total, names in totals.items())
        for totals in examples.values()
        if len(totals) > 1
    ]


def _left_out(files: list[Path]) -> list[str]:
    """Names that numbered files leave out; said where no index tells which files there are."""
    numbered = [match for file in files if (match := _NUMBERED.fullmatch(file.name))]
    names = {match[0] for match in numbered}
    totals = {(match[1], match[3]) for match in numbered}
    every = {
        f"{stem}-{number:0{len(total)}d}-of-{total}{SUFFIX}"
        for stem, total in totals
        for number in range(1, int(total) + 1)
    }
    return sorted(every - names)


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _unfinished(folder: Path) -> list[str]:
    """Names of what downloads leave behind while they run, also where download tools keep them (a hidden folder)."""
    if not folder.is_dir():
        return []
    places = [folder, *folder.glob(".cache/*/download")]
    return sorted(file.name for place in places for file in place.iterdir() if file.name.endswith(_UNFINISHED))


def _begun(unfinished: list[str]) -> str:
    if not unfinished:
        return ""
    return f"; downloads have begun and not ended: {unfinished[0]}{_and_more(len(unfinished) - 1)}"
