"""Safetensors files written tensor by tensor: read by the library, without a name until they are whole, digests."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deepspan.errors import WeightsError
from deepspan.weights.header import read_header
from deepspan.weights.writer import (
    UNFINISHED,
    ShardWriter,
    TensorHeader,
    digest_of,
    file_bytes,
    write_index,
    write_json,
    write_tensors,
)

_GENERATOR = torch.Generator().manual_seed(0)


def _numbers(*shape):
    return torch.randn(shape, generator=_GENERATOR)


TENSORS = {
    "b.weight": _numbers(3, 5).bfloat16(),
    "a.weight": _numbers(7).half(),
    "codes": torch.arange(-5, 6, dtype=torch.int8),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "fp8": _numbers(4, 3).to(torch.float8_e4m3fn),
    "scale": torch.tensor([[0.5, 2.0, 1024.0]]).to(torch.float8_e8m0fnu),
    "table": torch.arange(6, dtype=torch.int64).view(2, 3),
    "bias": torch.arange(3, dtype=torch.int32),
    "one": torch.tensor([1.5]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "turned": _numbers(4, 6).T,
}
HEADERS = {name: TensorHeader.of(tensor) for name, tensor in TENSORS.items()}


def _write(file, names=TENSORS):
    with ShardWriter(file, HEADERS) as writer:
        for name in names:
            writer.write(name, TENSORS[name])
        digest = writer.seal()
        writer.publish()
    return digest


def test_file_has_the_size_that_was_foretold_and_aligned_data(tmp_path):
    file = tmp_path / "x.safetensors"
    _write(file)
    assert file_bytes(HEADERS) == file.stat().st_size
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    assert entries.pop("__metadata__") == {"format": "pt"}
    for name, entry in entries.items():
        assert (start + entry["data_offsets"][0]) % TENSORS[name].element_size() == 0, name


def test_file_reads_back_as_what_was_written(tmp_path):
    _write(tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors").problems == ()
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), expected), name


def test_same_tensors_give_the_same_bytes_in_any_order(tmp_path):
    digests = {_write(tmp_path / "x", TENSORS), _write(tmp_path / "y", reversed(TENSORS))}
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert len(digests) == 1


def test_file_has_no_name_before_it_is_published(tmp_path):
    file = tmp_path / "x.safetensors"
    with ShardWriter(file, HEADERS) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
            assert [entry.name for entry in tmp_path.iterdir()] == [file.name + UNFINISHED]
        writer.seal()
        assert not file.exists()
        writer.publish()
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


def _write_some(file, tensors, end=lambda writer: None):
    with ShardWriter(file, HEADERS) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)
        end(writer)


def _interrupt(writer):
    raise KeyboardInterrupt


def test_file_that_is_left_early_leaves_nothing_behind(tmp_path):
    (tmp_path / "x").write_bytes(b"of an earlier run")
    with pytest.raises(KeyboardInterrupt):
        _write_some(tmp_path / "x", [("one", TENSORS["one"])], _interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"of an earlier run"


@pytest.mark.parametrize(
    ("tensors", "end", "message"),
    [
        ([("one", torch.tensor([1.5, 2.5]))], None, "one: planned"),
        ([("one", torch.tensor([1]))], None, "one: planned"),
        ([("scalar", torch.tensor(2.5))], None, "scalar: planned"),
        ([("one", TENSORS["one"])] * 2, None, "one is written twice"),
        ([("one", TENSORS["one"])], ShardWriter.seal, "not everything"),
        ([("one", TENSORS["one"])], ShardWriter.publish, "not everything"),
    ],
)
def test_file_of_other_tensors_than_announced_is_a_fault(tmp_path, tensors, end, message):
    with pytest.raises(AssertionError, match=message):
        _write_some(tmp_path / "x", tensors, end or (lambda writer: None))
    assert list(tmp_path.iterdir()) == []


def test_digest_of_a_file_is_that_of_its_writing_and_changes_with_every_byte(tmp_path):
    file = tmp_path / "x"
    digest, data = _write(file), file.read_bytes()
    assert digest_of(file) == digest
    start = len(data) - sum(header.num_bytes for header in HEADERS.values())
    for at in (*range(start, len(data), 7), len(data) - 1):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert digest_of(file) != digest, at
    renamed = data.replace(b'"one"', b'"One"')
    file.write_bytes(renamed)
    assert digest_of(file) != digest


def test_digest_of_a_file_that_is_cut_off_is_refused_by_name(tmp_path):
    _write(tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(WeightsError, match="x is not a complete safetensors file"):
        digest_of(tmp_path / "x")


def test_json_replaces_a_file_as_a_whole(tmp_path):
    for value in ({"a": 1}, {"b": [2]}):
        write_json(tmp_path / "x.json", value, durable=True)
        assert json.loads((tmp_path / "x.json").read_text()) == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_index_and_tensors_are_what_the_project_reads(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model.safetensors"}, 8)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "model.safetensors"},
    }
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(2))
