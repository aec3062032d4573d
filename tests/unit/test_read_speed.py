"""The speed of files: what was read over what it took."""

import os

import pytest

from deepspan.weights import read_speed as module
from deepspan.weights.read_speed import read_speed


@pytest.fixture
def files(tmp_path):
    found = []
    for number, size in enumerate((3 << 20, 2 << 20, 10)):
        found.append(tmp_path / f"{number}.safetensors")
        found[-1].write_bytes(os.urandom(size))
    return found


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is half a second later."""
    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks) / 2)


def test_speed_is_bytes_by_seconds_over_all_samples(files, clock):
    assert read_speed(files) == ((5 << 20) + 10) / 1.5


def test_speed_is_taken_from_the_largest_files_and_their_middles(files, clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 1)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1 << 20)
    assert read_speed(files) == (1 << 20) / 0.5


def test_speed_of_real_files_is_a_positive_number(files):
    assert read_speed(files) > 0


@pytest.mark.parametrize("chosen", [slice(2, 3), slice(0, 0)])
def test_speed_of_too_little_is_not_known(files, chosen):
    assert read_speed(files[chosen]) is None


def test_speed_is_not_known_where_files_cannot_be_forgotten(files, monkeypatch):
    monkeypatch.delattr(module.os, "posix_fadvise")
    assert read_speed(files) is None
