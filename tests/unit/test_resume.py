"""The journal of a conversion: what may be in its folder, which files count as finished, and room on the disk."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from deepspan.errors import WeightsError
from deepspan.weights.resume import JOURNAL, Journal, check_room, locked, read_journal, source_digest
from deepspan.weights.writer import UNFINISHED, digest_of, write_tensors

IDENTITY = {"format": "w8a8", "source": "a" * 64, "layers": 2}
KNOWN = ["a.safetensors", "b.safetensors", "config.json"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def _journal(folder, **changes):
    return Journal(folder, IDENTITY | changes, KNOWN)


def _names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def _finish(folder, *names):
    journal = _journal(folder)
    journal.begin()
    for name in names:
        write_tensors(folder / name, {name: torch.arange(100.0)})
        journal.record(name, digest_of(folder / name))


def _refused(folder, *parts, **changes):
    before = _names(folder) if folder.is_dir() else None
    with pytest.raises(WeightsError) as caught:
        _journal(folder, **changes)
    for part in (str(folder), *parts):
        assert part in str(caught.value)
    assert before is None or _names(folder) == before


# --- which folders


def test_journal_of_a_new_or_empty_folder_writes_nothing_yet(folder):
    assert _journal(folder / "new").finished == {}
    assert _journal(folder).finished == {}
    assert _names(folder) == []


@pytest.mark.parametrize("name", ["thesis.txt", "config.json", "a.safetensors.tmp", ".git"])
def test_journal_of_a_folder_with_something_else_is_refused(folder, name):
    (folder / name).touch()
    _refused(folder, f"it is not empty ({name})", "nothing was written")


def test_journal_names_few_of_many_strangers(folder):
    for number in range(5):
        (folder / f"file{number}").touch()
    _refused(folder, "(file0, file1, file2 and 2 more)")


def test_journal_whose_first_writing_was_cut_begins_anew(folder):
    (folder / (JOURNAL + UNFINISHED)).write_text('{"identi')
    _journal(folder).begin()
    assert _names(folder) == [JOURNAL]


def test_journal_of_a_file_is_refused(folder):
    (folder / "out").touch()
    _refused(folder / "out", "is a file, expected a folder")


def test_journal_beside_something_else_is_refused(folder):
    _finish(folder, "a.safetensors")
    (folder / "thesis.txt").touch()
    _refused(folder, "thesis.txt", "beside an unfinished conversion")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"format": "bf16"}, ["another format ('w8a8' there, 'bf16' now)"]),
        ({"layers": 3}, ["another layers (2 there, 3 now)"]),
        ({"source": "b" * 64}, ["another source; remove the folder"]),
        ({"new option": 1}, ["another new option (None there, 1 now)"]),
    ],
)
def test_journal_of_another_conversion_is_refused_by_what_differs(folder, changes, parts):
    _finish(folder, "a.safetensors")
    _refused(folder, *parts, **changes)


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "cannot be read"), ("[]", "is no journal"), ('{"identity": {}}', "is no journal"),
     ('{"identity": {}, "finished": []}', "is no journal")],
)  # fmt: skip
def test_journal_that_cannot_be_understood_is_refused(folder, text, part):
    (folder / JOURNAL).write_text(text)
    _refused(folder, JOURNAL, part)


# --- which files


def test_files_that_are_recorded_and_whole_are_finished(folder):
    _finish(folder, "a.safetensors", "b.safetensors")
    journal = _journal(folder)
    assert journal.verify(KNOWN) == {"a.safetensors", "b.safetensors"}
    journal.end()
    assert _names(folder) == ["a.safetensors", "b.safetensors"]
    assert read_journal(folder) is None


def test_file_without_a_record_is_not_finished(folder):
    _finish(folder, "a.safetensors")
    shutil.copyfile(folder / "a.safetensors", folder / "b.safetensors")
    assert _journal(folder).verify(KNOWN) == {"a.safetensors"}


@pytest.mark.parametrize("damage", ["cut", "changed", "longer", "gone", "folder"])
def test_recorded_file_that_is_no_longer_what_was_written_is_not_finished(folder, damage):
    _finish(folder, "a.safetensors", "b.safetensors")
    file = folder / "a.safetensors"
    data = file.read_bytes()
    changed = {"cut": data[:-4], "changed": data[:-1] + b"\1", "longer": data + b"\0"}
    file.unlink()
    if damage in changed:
        file.write_bytes(changed[damage])
    elif damage == "folder":
        file.mkdir()
    journal = _journal(folder)
    assert journal.verify(KNOWN) == {"b.safetensors"}
    assert set(journal.finished) == {"b.safetensors"}


def test_verifying_tells_each_file_that_is_good(folder):
    _finish(folder, "a.safetensors", "b.safetensors")
    (folder / "b.safetensors").unlink()
    told = []
    _journal(folder).verify(KNOWN, told.append)
    assert told == ["a.safetensors"]


def test_beginning_again_removes_what_is_not_finished_and_says_how_much(folder):
    _finish(folder, "a.safetensors")
    (folder / "b.safetensors").write_bytes(bytes(1000))
    (folder / ("b.safetensors" + UNFINISHED)).write_bytes(bytes(500))
    (folder / "config.json").write_bytes(bytes(7))
    journal = _journal(folder)
    journal.verify(KNOWN)
    assert journal.reclaimed() == 1507
    journal.begin()
    assert _names(folder) == [JOURNAL, "a.safetensors"]
    assert set(json.loads((folder / JOURNAL).read_text())["finished"]) == {"a.safetensors"}
    assert journal.reclaimed() == 0


# --- the source, the disk, other processes


def test_source_digest_changes_with_any_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("x")
    os.utime(file, ns=(0, 10**9))
    first = source_digest(tmp_path)
    assert source_digest(tmp_path) == first
    os.utime(file, ns=(0, 10**9 + 1))
    second = source_digest(tmp_path)
    file.write_text("xy")
    os.utime(file, ns=(0, 10**9))
    third = source_digest(tmp_path)
    file.rename(tmp_path / "b")
    assert len({first, second, third, source_digest(tmp_path)}) == 4


def test_room_is_looked_for_on_the_disk_of_the_nearest_folder_that_is_there(tmp_path, monkeypatch):
    asked = []

    def usage(folder):
        asked.append(folder)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr("shutil.disk_usage", usage)
    check_room(tmp_path / "new" / "out", 1000)
    check_room(tmp_path, 1200, reclaimed=200)
    with pytest.raises(WeightsError, match=r"out needs 1,201 more bytes \(0\.0 GB\), its disk has 1,200 free"):
        check_room(tmp_path / "out", 1201, reclaimed=200)
    assert asked == [tmp_path] * 3


def test_folder_is_locked_against_other_processes(tmp_path):
    code = (
        "import sys, pathlib; from deepspan.weights.resume import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('in')"
    )

    def enter():
        return subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)

    with locked(tmp_path):
        done = enter()
        assert done.returncode == 1
        assert f"{tmp_path} is being written by another conversion" in done.stderr
    assert enter().stdout == "in\n"
