"""Checkpoint folders: one file or shards with an index, and every way in which they may not fit together."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspan.errors import WeightsError
from deepspan.weights.checkpoint import INDEX_FILE, Checkpoint, torch_dtype_name
from deepspan.weights.folder import Headers

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea423c\nsize 3580000000\n"
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


def test_checkpoint_index_that_is_a_git_lfs_pointer_is_refused_by_file(sharded):
    (sharded / INDEX_FILE).write_text(LFS_POINTER)
    _refused(sharded, f"{INDEX_FILE} is a Git LFS pointer")


@pytest.mark.parametrize(
    ("weight_map", "parts"),
    [
        ({}, ["weight_map is empty"]),
        ({"b": "../b.safetensors"}, ["places b in '../b.safetensors'", "of the same folder"]),
        ({"b": "pytorch_model.bin"}, ["places b in 'pytorch_model.bin'", ".safetensors file"]),
    ],
)
def test_checkpoint_with_index_of_other_files_is_refused(sharded, weight_map, parts):
    _write_index(sharded, weight_map)
    _refused(sharded, INDEX_FILE, *parts)


def test_checkpoint_with_index_that_places_a_tensor_twice_is_refused_by_both(sharded):
    (sharded / INDEX_FILE).write_text(f'{{"weight_map": {{"b": "{SHARDS[0]}", "b": "{SHARDS[1]}"}}}}')
    _refused(sharded, f"it places b in {SHARDS[0]!r} and in {SHARDS[1]!r}")


def test_checkpoint_with_git_lfs_pointer_in_place_of_a_shard_is_refused_by_file(sharded):
    (sharded / SHARDS[1]).write_text(LFS_POINTER)
    _refused(sharded, f"{SHARDS[1]} is a Git LFS pointer", "3,580,000,000 bytes")


def test_checkpoint_in_download_says_what_has_not_ended(sharded):
    (sharded / SHARDS[1]).rename(sharded / f"{SHARDS[1]}.incomplete")
    _refused(sharded, f"{SHARDS[1]} is missing", "places 2 tensors there, b first", f"ended: {SHARDS[1]}.incomplete")
    (sharded / f"{SHARDS[1]}.incomplete").unlink()
    hidden = sharded / ".cache" / "hub" / "download"
    hidden.mkdir(parents=True)
    for name in ("x.incomplete", "y.incomplete", "y.metadata"):
        (hidden / name).touch()
    _refused(sharded, f"{SHARDS[1]} is missing", "ended: x.incomplete and 1 more")


def test_checkpoint_in_download_of_a_single_file_says_so(single):
    (single / SINGLE).rename(single / f"{SINGLE}.part")
    _refused(single, "no safetensors files", f"{SINGLE}.part")


def test_checkpoint_with_missing_shards_mentions_a_consolidated_file_beside_them(sharded):
    save_file(TENSORS, sharded / SINGLE)
    (sharded / SHARDS[0]).unlink()
    _refused(sharded, f"{SHARDS[0]} is missing", f"{SINGLE} is there and not named by the index")


def test_checkpoint_with_one_shard_and_no_index_is_refused_by_the_missing_one(sharded):
    (sharded / SHARDS[1]).unlink()
    (sharded / INDEX_FILE).unlink()
    _refused(sharded, f"{SHARDS[0]} is the only file", f"no {INDEX_FILE}", f"{SHARDS[1]} is missing")


def test_checkpoint_with_index_of_two_releases_is_refused_by_files(sharded):
    other = "model-00002-of-00003.safetensors"
    (sharded / SHARDS[1]).rename(sharded / other)
    _write_index(sharded, {name: place.replace(SHARDS[1], other) for name, place in PLACES.items()})
    _refused(sharded, "files of 2 releases", f"1 of 2 such as {SHARDS[0]}", f"1 of 3 such as {other}")


def test_checkpoint_with_index_that_leaves_a_number_out_is_accepted(sharded):
    """Whoever prunes a checkpoint (draft stages, say) need not rename what is left."""
    (sharded / SHARDS[1]).unlink()
    _write_index(sharded, {name: place for name, place in PLACES.items() if place == SHARDS[0]})
    assert set(Checkpoint(sharded)) == {"a.weight", "c.stack"}


def test_checkpoint_with_a_shard_of_another_release_is_refused_by_its_tensors(sharded):
    save_file({"b": TENSORS["b"], "d.tables": TENSORS["d.table"]}, sharded / SHARDS[1])
    _refused(sharded, f"places tensor d.table in {SHARDS[1]}", f"tensor d.tables of {SHARDS[1]} is not in {INDEX_FILE}")


def test_checkpoint_with_many_problems_names_the_first_and_counts_the_rest(sharded):
    _write_index(sharded, PLACES | {f"t{number}": SHARDS[0] for number in range(20)})
    with pytest.raises(WeightsError, match=r"tensor t7 .*; and 12 problems more$"):
        Checkpoint(sharded)


def test_checkpoint_with_faulty_file_is_not_also_blamed_for_what_it_lacks(sharded):
    data = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(data[:20])
    (sharded / SHARDS[0]).unlink()
    missing, broken = Headers(sharded).problems
    assert f"{SHARDS[0]} is missing" in missing
    assert f"{SHARDS[1]} is not a complete" in broken


def test_headers_of_a_truncated_file_are_read_all_the_same(sharded):
    data = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(data[:-1])
    headers = Headers(sharded)
    assert set(headers) == set(TENSORS)
    assert len(headers.problems) == 1


def test_headers_import_neither_torch_nor_safetensors():
    code = "import sys, deepspan.weights.folder; print({'torch', 'safetensors', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_dtype_name_is_that_of_the_configuration():
    assert torch_dtype_name(torch.bfloat16) == "bfloat16"
