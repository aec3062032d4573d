"""Looking at checkpoints: right ones of real size by their headers, and every fault of broken ones by name."""

import json

import pytest
import torch
from header_helpers import write_headers, write_release
from released import flash, flash_vision
from safetensors.torch import load_file, save_file

from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError
from deepspan.weights.examine import examine
from deepspan.weights.inventory import expected_headers
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.tiny import write_tiny

INDEX = "model.safetensors.index.json"


def _totals(found):
    return sum(p.num_tensors for p in found.parts.values()), sum(p.num_bytes for p in found.parts.values())


def _release(folder, raw):
    return write_release(folder, raw, expected_headers(parse_model_config(raw), folder).tensors)


def _edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


# --- of real size: headers of 160 GB, without their data


@pytest.fixture(scope="module")
def text_release(tmp_path_factory):
    return _release(tmp_path_factory.mktemp("text"), flash())


def test_text_release_is_counted_from_headers_alone(text_release):
    found = examine(text_release)
    assert found.source == "files"
    assert _totals(found) == found.expected == (69_187, 159_609_485_896)
    assert (found.problems, found.remarks, found.missing_files) == ({}, (), ())
    assert len(found.files) == 45
    assert found.left_out == {"drafting is off": 1575}


def test_vision_release_is_counted_from_headers_alone(tmp_path):
    found = examine(_release(tmp_path, flash_vision()))
    assert _totals(found)[1] == 167_811_372_792
    assert (found.problems, found.remarks) == ({}, ())
    assert found.left_out == {"drafting is off": 4708, "hash layers choose by table and by bias_vl": 3}


def test_index_of_the_release_alone_is_compared_by_name(text_release, tmp_path):
    for name in ("config.json", INDEX):
        (tmp_path / name).write_bytes((text_release / name).read_bytes())
    found = examine(tmp_path)
    assert found.source == "index"
    assert _totals(found) == (69_187, 159_609_485_896)
    assert list(found.problems) == ["files"]
    assert "none of the 45 files" in found.problems["files"][0]
    assert found.remarks == ()

    def spoil(index):
        del index["weight_map"]["layers.7.attn.attn_sink"]
        index["weight_map"]["layers.7.attn.sink"] = "model-00001-of-00045.safetensors"
        index["metadata"]["total_size"] += 5

    _edit_index(tmp_path, spoil)
    found = examine(tmp_path)
    assert found.problems["missing"] == ["layers.7.attn.attn_sink"]
    assert found.problems["unexpected"] == ["layers.7.attn.sink"]
    assert found.remarks == (
        f"{INDEX} states 159,609,485,901 bytes in all, the configuration lets expect 159,609,485,896",
    )


def test_configuration_alone_gives_the_numbers_of_the_release(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(flash()))
    for model in (tmp_path, tmp_path / "config.json"):
        found = examine(model)
        assert found.source == "configuration"
        assert _totals(found) == (69_187, 159_609_485_896)
        assert "no weights at" in found.remarks[0]
        assert found.problems == {}


# --- right ones


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    plain = write_tiny(root / "plain", ratios=(0, 4, 128), draft_stages=2, num_shards=3)
    renamed = write_tiny(root / "renamed", ratios=(0, 4, 128), num_shards=3, transformers_names=True)
    return {"plain": plain, "renamed": renamed} | {
        name: write_quantised(plain, root / name, recipe) for name, recipe in RECIPES.items()
    }


@pytest.mark.parametrize("kind", ["plain", "renamed", *RECIPES])
def test_right_checkpoint_has_no_problems_and_all_its_bytes(written, kind):
    found = examine(written[kind])
    assert (found.problems, found.remarks) == ({}, ())
    files = [load_file(file) for file in sorted(written[kind].glob("*.safetensors"))]
    assert _totals(found) == (sum(map(len, files)), sum(t.nbytes for tensors in files for t in tensors.values()))
    plain = examine(written["plain"])
    drafts = ("draft stages", "draft experts")
    same = {part: count.num_parameters for part, count in plain.parts.items() if part not in drafts}
    assert {part: found.parts[part].num_parameters for part in same} == same


# --- what is wrong


@pytest.fixture
def folder(written, tmp_path):
    """A copy of a checkpoint in three files: `folder(kind)`."""

    def copy(kind="fp8-fp4"):
        for file in written[kind].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return copy


def _shards(folder):
    return sorted(folder.glob("*.safetensors"))


def _change(folder, edit):
    """Edit the tensors of the first file."""
    file = _shards(folder)[0]
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return tensors


@pytest.mark.parametrize("kind", ["plain", "renamed", "fp8-fp4", "w8a8"])
def test_missing_file_is_named_once_and_its_tensors_are_not_listed(folder, kind):
    path = folder(kind)
    gone = _shards(path)[1]
    count = len(load_file(gone))
    gone.unlink()
    found = examine(path)
    assert list(found.problems) == ["files"]
    [message] = found.problems["files"]
    assert gone.name in message
    assert f"places {count} tensors" in message
    assert found.missing_files == (gone.name,)
    if kind != "w8a8":
        assert found.expected is not None
        stages = 0 if kind == "renamed" else _drafts(path)
        assert found.expected[0] - _totals(found)[0] == count or stages == 0


def _drafts(path):
    return sum(name.startswith("mtp.") for name in json.loads((path / INDEX).read_text())["weight_map"])


def test_cut_file_is_named_and_still_counted(folder):
    path = folder()
    file = _shards(path)[0]
    before = examine(path)
    file.write_bytes(file.read_bytes()[:-10])
    found = examine(path)
    assert list(found.problems) == ["files"]
    assert file.name in found.problems["files"][0]
    assert _totals(found) == _totals(before)


def test_all_faults_of_tensors_are_named_together(folder):
    path = folder()
    tensors = load_file(_shards(path)[0])
    weights = [n for n, t in tensors.items() if n.endswith("attn.wq_b.weight")]
    plain = [n for n, t in tensors.items() if t.dtype == torch.float32 and n.endswith("hc_attn_base")]
    gone = [n for n in tensors if n.endswith("attn_norm.weight")]
    assert weights
    assert plain
    assert gone

    def spoil(tensors):
        tensors[weights[0]] = tensors[weights[0]][:-1].clone()
        tensors[plain[0]] = tensors[plain[0]].to(torch.int16)
        del tensors[gone[0]]
        tensors["layers.0.left_over"] = torch.zeros(2)

    _change(path, spoil)
    name = _shards(path)[0].name

    def follow(index):
        del index["weight_map"][gone[0]]
        index["weight_map"]["layers.0.left_over"] = name

    _edit_index(path, follow)
    found = examine(path)
    assert set(found.problems) == {"missing", "unexpected", "wrong shape", "wrong dtype"}
    assert found.problems["missing"] == [gone[0]]
    assert found.problems["unexpected"] == [f"layers.0.left_over ({name})"]
    assert found.parts["unknown"].num_tensors == 1
    [shape] = found.problems["wrong shape"]
    assert weights[0] in shape
    [dtype] = found.problems["wrong dtype"]
    assert f"{plain[0]} is stored as I16" in dtype


def test_more_than_a_message_of_the_loader_is_listed(folder):
    path = folder("plain")
    gone = [name for name in load_file(_shards(path)[0]) if ".experts." in name]
    assert len(gone) > 8
    _change(path, lambda tensors: [tensors.pop(name) for name in gone])
    _edit_index(path, lambda index: [index["weight_map"].pop(name) for name in gone])
    assert sorted(examine(path).problems["missing"]) == sorted(gone)


def test_foreign_names_are_unexpected_each(folder):
    path = folder("renamed")
    tensors = _change(path, lambda tensors: tensors.update({"layers.0.attn.foo": torch.zeros(1)}))
    assert "layers.0.attn.foo" in tensors
    _edit_index(path, lambda index: index["weight_map"].update({"layers.0.attn.foo": _shards(path)[0].name}))
    found = examine(path)
    assert list(found.problems) == ["unexpected"]
    assert "layers.0.attn.foo" in found.problems["unexpected"][0]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"expert_dtype": "fp8"}, "expert_dtype in config.json says fp8"),
        ({"dspark_block_size": None, "dspark_noise_token_id": None, "dspark_target_layer_ids": None,
          "dspark_markov_rank": None}, "no dspark_block_size"),
    ],
)  # fmt: skip
def test_configuration_that_contradicts_the_files_is_a_problem(folder, fields, part):
    path = folder()
    raw = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    found = examine(path)
    assert list(found.problems) == ["formats"]
    assert part in found.problems["formats"][0]


def test_description_that_contradicts_the_files_is_a_problem(folder):
    path = folder("w8a8")
    file = path / "quant_model_description.json"
    labels = json.loads(file.read_text())
    labels["layers.0.attn.wq_b.weight"] = "W3A8"
    file.write_text(json.dumps(labels))
    found = examine(path)
    assert list(found.problems) == ["formats"]
    assert "layers.0.attn.wq_b.weight is 'W3A8'" in found.problems["formats"][0]


def test_two_releases_in_one_folder_are_remarked(folder):
    path = folder("plain")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if not name.startswith("vision_")})
    )
    found = examine(path)
    assert list(found.problems) == ["unexpected"]
    assert "come from two releases" in found.remarks[0]


def test_scales_of_two_kinds_are_a_problem(folder):
    path = folder()
    scale = next(n for n in load_file(_shards(path)[0]) if n.endswith("attn.wq_b.scale"))
    _change(path, lambda tensors: tensors.update({scale: tensors[scale].float()}))
    assert "of two kinds" in examine(path).problems["formats"][0]


def test_files_outside_the_index_and_another_total_are_remarked(folder):
    path = folder()
    (path / "other.safetensors").write_bytes((_shards(path)[0]).read_bytes())
    _edit_index(path, lambda index: index["metadata"].update(total_size=7))
    found = examine(path)
    assert found.problems == {}
    assert len(found.remarks) == 2
    assert "other.safetensors is not named" in found.remarks[0]
    assert "states 7 bytes in all" in found.remarks[1]


def test_examine_of_a_folder_without_configuration_is_refused(tmp_path):
    write_headers(tmp_path / "model.safetensors", {})
    with pytest.raises(ConfigError, match=r"no config\.json"):
        examine(tmp_path)
