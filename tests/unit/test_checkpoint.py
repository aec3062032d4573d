"""Checkpoint folders: one file or shards with an index, and every way in which they may not fit together."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspan.errors import WeightsError
from deepspan.weights.checkpoint import INDEX_FILE, Checkpoint, torch_dtype_name

SINGLE = "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.float32),
    "c.stack": torch.arange(24, dtype=torch.float32).reshape(2, 6, 2),
    "d.table": torch.arange(3, dtype=torch.int64),
}
PLACES = {"a.weight": SHARDS[0], "b": SHARDS[1], "c.stack": SHARDS[0], "d.table": SHARDS[1]}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    for shard in SHARDS:
        save_file({name: TENSORS[name] for name, place in PLACES.items() if place == shard}, tmp_path / shard)
    _write_index(tmp_path, PLACES)
    return tmp_path


def _write_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _refused(folder, *parts):
    with pytest.raises(WeightsError) as caught:
        Checkpoint(folder)
    for part in parts:
        assert part in str(caught.value)


# --- what fits


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_checkpoint_gives_headers_and_tensors(kind, request):
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    assert set(checkpoint) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tensor.shape
    dtypes = {name: stored.dtype for name, stored in checkpoint.tensors.items()}
    assert dtypes == {"a.weight": "BF16", "b": "F32", "c.stack": "F32", "d.table": "I64"}


def test_checkpoint_reads_one_expert_of_a_stack(single):
    checkpoint = Checkpoint(single)
    assert torch.equal(checkpoint.read("c.stack", expert=1), TENSORS["c.stack"][1])
    assert torch.equal(checkpoint.read("c.stack", expert=0, part=2, num_parts=3), TENSORS["c.stack"][0, 4:6])


def test_checkpoint_accepts_a_string_path_and_another_file_name(tmp_path):
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert set(Checkpoint(str(tmp_path))) == set(TENSORS)


def test_checkpoint_with_file_outside_the_index_warns_and_leaves_it(sharded, caplog):
    save_file({"e": torch.zeros(1)}, sharded / "extra.safetensors")
    with caplog.at_level(logging.WARNING):
        assert set(Checkpoint(sharded)) == set(TENSORS)
    assert "extra.safetensors is not named by" in caplog.text
    assert len(caplog.records) == 1


def test_checkpoint_of_fitting_files_warns_of_nothing(sharded, caplog):
    with caplog.at_level(logging.WARNING):
        Checkpoint(sharded)
    assert not caplog.records


# --- what does not


def test_checkpoint_folder_without_files_is_refused(tmp_path):
    _refused(tmp_path, "no safetensors files", str(tmp_path))


def test_checkpoint_with_several_files_and_no_index_is_refused(sharded):
    (sharded / INDEX_FILE).unlink()
    _refused(sharded, "2 safetensors files", SHARDS[0], f"no {INDEX_FILE}")


def test_checkpoint_with_missing_shard_is_refused_by_file(sharded):
    (sharded / SHARDS[1]).unlink()
    _refused(sharded, f"{SHARDS[1]} is missing")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_checkpoint_with_truncated_file_is_refused_by_file(single, num_bytes):
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[:num_bytes])
    _refused(single, f"{SINGLE} is not a complete safetensors file")


def test_checkpoint_with_folder_in_place_of_a_file_is_refused(sharded):
    (sharded / SHARDS[0]).unlink()
    (sharded / SHARDS[0]).mkdir()
    _refused(sharded, f"{SHARDS[0]} is not a complete safetensors file")


def test_checkpoint_with_tensor_in_two_shards_is_refused_by_both(sharded):
    both = load_file(sharded / SHARDS[1]) | {"a.weight": TENSORS["a.weight"]}
    save_file(both, sharded / SHARDS[1])
    _refused(sharded, "tensor a.weight", SHARDS[0], f"again in {SHARDS[1]}")


def test_checkpoint_with_index_naming_the_wrong_shard_is_refused_by_tensor(sharded):
    _write_index(sharded, PLACES | {"b": SHARDS[0]})
    _refused(sharded, f"places tensor b in {SHARDS[0]}", f"it is in {SHARDS[1]}")


def test_checkpoint_with_index_naming_an_absent_tensor_is_refused_by_tensor(sharded):
    _write_index(sharded, PLACES | {"e": SHARDS[0]})
    _refused(sharded, f"places tensor e in {SHARDS[0]}", "does not hold it")


def test_checkpoint_with_tensor_outside_the_index_is_refused_by_tensor(sharded):
    _write_index(sharded, {name: place for name, place in PLACES.items() if name != "d.table"})
    _refused(sharded, "tensor d.table", SHARDS[1], f"not in {INDEX_FILE}")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}', "null"]
)
def test_checkpoint_with_broken_index_is_refused_by_file(sharded, text):
    (sharded / INDEX_FILE).write_text(text)
    _refused(sharded, INDEX_FILE)


def test_dtype_name_is_that_of_the_configuration():
    assert torch_dtype_name(torch.bfloat16) == "bfloat16"
