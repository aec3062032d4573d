"""Conversions that are cut off: killed inside and between files, or failing; the next run ends with the same bytes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspan.errors import DeepspanError, WeightsError
from deepspan.weights import convert as conversion
from deepspan.weights.convert import Calibration, convert, earlier_calibration
from deepspan.weights.load import load_model
from deepspan.weights.quantise import InputRange
from deepspan.weights.resume import JOURNAL, Journal
from deepspan.weights.tiny import write_tiny
from deepspan.weights.writer import UNFINISHED, ShardWriter

TO, SHARD_BYTES = "fp8-fp4", 100_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("resume") / "plain", ratios=(0, 4), vision=False)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """What an uninterrupted run writes, by name."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert _run(source, folder).files == 4
    return _contents(folder)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def _run(source, folder, **options):
    return convert(source, folder, **{"to": TO, "shard_bytes": SHARD_BYTES} | options)


def _contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _shards(folder):
    return sorted(file.name for file in folder.glob("*.safetensors"))


def _written(folder):
    """Times of the files that are there, to see which are written again."""
    return {name: (folder / name).stat().st_mtime_ns for name in _shards(folder)}


def _assert_ends_well(source, folder, whole, *, resumed):
    before = _written(folder)
    done = _run(source, folder)
    assert done.resumed == resumed
    assert _contents(folder) == whole
    kept = [name for name, when in _written(folder).items() if before.get(name) == when]
    assert len(kept) == resumed
    load_model(folder, dtype=torch.float32)


def _sizes(whole):
    """Number of tensors of each file, in order."""
    files = [whole[name] for name in sorted(whole) if name.endswith(".safetensors")]
    return [len(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) - 1 for data in files]


# --- killed

KILLED = """
import os, signal, sys
from pathlib import Path
from deepspan.weights import convert
from deepspan.weights.resume import Journal
from deepspan.weights.writer import ShardWriter

owners = {"write": ShardWriter, "record": Journal, "publish": ShardWriter, "end": Journal, "_write_beside": convert}
place, number = sys.argv[3], int(sys.argv[4])
plain, count = getattr(owners[place], place), 0

def until(*arguments):
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)

setattr(owners[place], place, until)
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), "fp8-fp4", shard_bytes=100_000)
"""


@pytest.mark.parametrize(
    ("place", "resumed", "cut"),
    [
        ("write", 1, "model-00002"),  # inside the second file
        ("record", 1, "model-00002"),  # it is whole on disk, and neither recorded nor named
        ("publish", 1, "model-00002"),  # it is recorded, and not yet named
        ("_write_beside", 4, None),  # all files are there, config.json is not
        ("end", 4, None),  # everything is there, the journal too
    ],
)
def test_killed_conversion_goes_on_where_it_was(source, folder, whole, place, resumed, cut):
    number = {"write": _sizes(whole)[0] + 5, "record": 2, "publish": 2}.get(place, 1)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, folder, place, str(number)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (folder / JOURNAL).exists()
    left = [file.name.startswith(cut or "-") for file in folder.glob(f"*.safetensors{UNFINISHED}")]
    assert left == ([True] if cut else [])
    if place != "end":
        with pytest.raises(DeepspanError):
            load_model(folder, dtype=torch.float32)
    _assert_ends_well(source, folder, whole, resumed=resumed)


# --- failing at any point


def _break_at(monkeypatch, number, error):
    """The `number`-th of all tensors written fails."""
    plain, count = ShardWriter.write, 0

    def write(self, name, tensor):
        nonlocal count
        count += 1
        if count == number:
            raise error
        plain(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "write", write)


def _interrupted(monkeypatch, source, folder, number, **options):
    """A run that ends with the `number`-th tensor."""
    with monkeypatch.context() as patch:
        _break_at(patch, number, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            _run(source, folder, **options)


@pytest.mark.parametrize("number", [1, 2, 30, 90, 150])
def test_conversion_that_is_interrupted_keeps_whole_files_only(source, folder, whole, monkeypatch, number):
    _interrupted(monkeypatch, source, folder, number)
    assert not list(folder.glob(f"*{UNFINISHED}"))
    there = _shards(folder)
    assert all((folder / name).read_bytes() == whole[name] for name in there)
    _assert_ends_well(source, folder, whole, resumed=len(there))


def test_conversion_that_is_interrupted_in_every_file_ends_with_the_same_bytes(source, folder, whole, monkeypatch):
    for number, size in enumerate(_sizes(whole)[:-1], start=1):
        _interrupted(monkeypatch, source, folder, size)  # with the last tensor of a file
        _interrupted(monkeypatch, source, folder, size + 1)  # with the first of the next
        assert len(_shards(folder)) == number
    _assert_ends_well(source, folder, whole, resumed=3)


def test_full_disk_is_told_with_the_folder_and_what_to_do(source, folder, whole, monkeypatch):
    with monkeypatch.context() as patch:
        _break_at(patch, _sizes(whole)[0] + 1, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(WeightsError, match=r"out: No space left on device; files that are finished are kept"):
            _run(source, folder)
    _assert_ends_well(source, folder, whole, resumed=1)


def test_disk_without_room_is_refused_before_anything_is_written(source, folder, whole, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 200_000))
    with pytest.raises(
        WeightsError, match=r"out needs \d{3},\d{3} more bytes .* has 200,000 free; nothing was written"
    ):
        _run(source, folder)
    assert not folder.exists()


def test_room_that_is_asked_for_is_what_is_written(source, folder, whole, monkeypatch):
    """Within the small files; what is finished needs no room again."""
    asked = []
    monkeypatch.setattr(conversion, "check_room", lambda folder, needed, reclaimed=0: asked.append(needed))
    _run(source, folder)
    size = sum(len(data) for data in whole.values())
    assert asked[0] == asked[1]
    assert size <= asked[0] < 1.1 * size
    shutil.rmtree(folder)
    _interrupted(monkeypatch, source, folder, _sizes(whole)[0] + 1)
    (first,) = _shards(folder)
    asked.clear()
    _run(source, folder)
    assert size - len(whole[first]) <= asked[0] < 1.1 * size - len(whole[first])
    assert len(asked) == 1


# --- what is found is not what was left


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_finished_file_that_was_damaged_is_written_again(source, folder, whole, monkeypatch, damage):
    _interrupted(monkeypatch, source, folder, 150)
    there = _shards(folder)
    assert len(there) >= 2
    file = folder / there[0]
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    _assert_ends_well(source, folder, whole, resumed=len(there) - 1)


def test_file_with_a_name_and_no_record_is_written_again(source, folder, whole, monkeypatch):
    _interrupted(monkeypatch, source, folder, 40)
    name = "model-00001-of-00004.safetensors"
    assert name in whole
    (folder / name).write_bytes(whole[name][:-1] + b"\0")
    _assert_ends_well(source, folder, whole, resumed=0)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"shard_bytes": 90_000}, "another layout of files"),
        ({"to": "bf16"}, "another format ('fp8-fp4' there, 'bf16' now"),
    ],
)
def test_other_options_do_not_go_on(source, folder, monkeypatch, options, part):
    _interrupted(monkeypatch, source, folder, 150)
    before = _contents(folder)
    with pytest.raises(WeightsError) as caught:
        _run(source, folder, **options)
    assert part in str(caught.value)
    assert _contents(folder) == before


def test_source_that_has_changed_does_not_go_on(source, folder, monkeypatch, tmp_path):
    copy = shutil.copytree(source, tmp_path / "source")
    _interrupted(monkeypatch, copy, folder, 150)
    os.utime(copy / "model.safetensors", ns=(0, 1))
    with pytest.raises(WeightsError, match="an unfinished conversion with another source;"):
        _run(copy, folder)


def test_finished_conversion_is_not_written_over(source, folder, whole):
    _run(source, folder)
    with pytest.raises(WeightsError, match="it is not empty"):
        _run(source, folder)
    assert _contents(folder) == whole


def test_folder_that_another_run_is_writing_is_refused(source, folder, monkeypatch):
    refused = []

    def second(written, total):
        if not refused:
            with pytest.raises(WeightsError, match="is being written by another conversion"):
                _run(source, folder)
            refused.append(written)

    _run(source, folder, progress=second)
    assert refused


def test_resuming_counts_what_is_finished_first(source, folder, monkeypatch):
    _interrupted(monkeypatch, source, folder, 150)
    seen = []
    done = _run(source, folder, progress=lambda *step: seen.append(step))
    sizes = [sum(t.nbytes for t in load_file(folder / name).values()) for name in _shards(folder)]
    assert [step[0] for step in seen[: done.resumed]] == [sum(sizes[: n + 1]) for n in range(done.resumed)]
    assert seen[-1] == (done.bytes, done.bytes)


# --- calibration is not done twice


def test_ranges_of_an_interrupted_conversion_are_found_again(source, folder, monkeypatch):
    seen = Calibration(digest="x" * 64, inputs={"layers.1.attn.wq_b": InputRange(low=-0.1, high=1 / 3)})
    assert earlier_calibration(source, folder, seen.digest) is None
    _interrupted(monkeypatch, source, folder, 150, to="w8a8", calibration=seen)
    assert earlier_calibration(source, folder, seen.digest) == seen
    assert earlier_calibration(source, folder, "y" * 64) is None
    with pytest.raises(WeightsError, match="another calibration"):
        convert(source, folder, "w8a8", shard_bytes=SHARD_BYTES)
    assert convert(source, folder, "w8a8", shard_bytes=SHARD_BYTES, calibration=seen).resumed > 0
    assert earlier_calibration(source, folder, seen.digest) is None


def test_ranges_of_another_source_are_not_taken(source, folder, monkeypatch, tmp_path):
    copy = shutil.copytree(source, tmp_path / "source")
    seen = Calibration(digest="x" * 64, inputs={"layers.1.attn.wq_b": InputRange(low=0, high=1)})
    _interrupted(monkeypatch, copy, folder, 30, to="w8a8", calibration=seen)
    os.utime(copy / "model.safetensors", ns=(0, 1))
    assert earlier_calibration(copy, folder, seen.digest) is None


def test_journal_is_a_plain_file_that_says_what_is_finished(source, folder, monkeypatch):
    _interrupted(monkeypatch, source, folder, 150)
    found = json.loads((folder / JOURNAL).read_text())
    assert list(found["finished"]) == _shards(folder)
    assert isinstance(Journal(Path(folder), found["identity"], [*found["finished"]]), Journal)
