"""The first layers and a few experts of a checkpoint: what is kept is kept, what must change fits, the result loads."""

import json

import pytest
import torch
from quantised_helpers import stored_tensors

from deepspan.errors import ConfigError
from deepspan.weights.convert import convert
from deepspan.weights.folder import DESCRIPTION_FILE
from deepspan.weights.load import load_model
from deepspan.weights.subset import Subset, remapped
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny

RATIOS = (0, 4, 128, 4, 0)
ROUTER = (".gate.weight", ".gate.bias", ".gate.bias_vl")
FIELDS = {"num_hash_layers": 2, "num_experts_per_tok": 3, "layer_types": list("abcde")}
TARGETS = {"dspark_target_layer_ids": [1, 3, 4]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("subset")
    whole = write_tiny(root / "bf16", ratios=RATIOS, draft_stages=2, num_shards=2, overrides=FIELDS | TARGETS)
    text = write_tiny(root / "text", ratios=RATIOS, vision=False, overrides=FIELDS)
    for to in ("fp8-fp4", "w8a8"):
        convert(whole, root / to, to)
    return {"bf16": whole, "text": text, "fp8-fp4": root / "fp8-fp4", "w8a8": root / "w8a8"}


def _cut(source, out, layers=3, experts=4, *, keep_drafts=False):
    return convert(
        source, out, "tiny-subset", subset=Subset(layers=layers, experts=experts, keep_drafts=keep_drafts)
    )  # fmt: skip


def _config(folder):
    return json.loads((folder / "config.json").read_text())


def _same_bits(found, expected):
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("form", "keep_drafts"),
    [("bf16", False), ("text", False), ("fp8-fp4", False), ("w8a8", False), ("bf16", True), ("w8a8", True)],
)
def test_part_holds_the_first_layers_and_experts_byte_by_byte(folders, tmp_path, form, keep_drafts):
    done = _cut(folders[form], tmp_path / "out", keep_drafts=keep_drafts)
    whole, part = stored_tensors(folders[form]), stored_tensors(tmp_path / "out")
    expected = {
        name
        for name in whole
        if not name.startswith(("layers.3.", "layers.4."))
        and not any(f".experts.{expert}." in name for expert in range(4, 8))
        and (keep_drafts or not name.startswith("mtp."))
    }
    assert set(part) == expected
    changed = {name for name in part if not _same_bits(part[name], whole[name])}
    assert changed == {name for name in part if name.endswith((*ROUTER, "tid2eid"))}
    for name in changed:
        if not name.endswith("tid2eid"):
            assert _same_bits(part[name], whole[name][:4]), name
    assert done.kept == len(part) - len(changed)


@pytest.mark.parametrize("form", ["bf16", "text", "fp8-fp4", "w8a8"])
@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 4), (5, 8)])
def test_part_loads_in_every_form(folders, tmp_path, form, layers, experts):
    _cut(folders[form], tmp_path / "out", layers, experts)
    loaded = load_model(tmp_path / "out", dtype=torch.float32)
    config = loaded.config
    assert config.compress_ratios == RATIOS[:layers]
    assert (config.num_hidden_layers, config.n_routed_experts) == (layers, experts)
    assert config.num_experts_per_tok == min(3, experts)
    assert config.num_hash_layers == min(2, layers)
    assert config.draft is None
    assert (config.vision is None) == (form == "text")
    assert not any(value.is_meta for value in loaded.network.state_dict().values())
    described = (tmp_path / "out" / DESCRIPTION_FILE).exists()
    assert described == (form == "w8a8")


@pytest.mark.parametrize("form", ["bf16", "fp8-fp4", "w8a8"])
def test_part_with_draft_stages_loads_them(folders, tmp_path, form):
    done = _cut(folders[form], tmp_path / "out", keep_drafts=True)
    loaded = load_model(tmp_path / "out", dtype=torch.float32, drafts=DraftKind.DSPARK)
    assert loaded.drafter.num_stages == 2
    assert _config(tmp_path / "out")["compress_ratios"] == [0, 4, 128, 0, 0]
    assert _config(tmp_path / "out")["dspark_target_layer_ids"] == [0, 1, 2]
    assert _config(tmp_path / "out")["num_nextn_predict_layers"] == 2
    assert list(done.remarks) == ["dspark_target_layer_ids is [0, 1, 2] instead of [1, 3, 4]"]


def test_targets_of_drafts_that_are_all_there_stay(folders, tmp_path):
    assert list(_cut(folders["bf16"], tmp_path / "out", layers=5, keep_drafts=True).remarks) == []
    assert _config(tmp_path / "out")["dspark_target_layer_ids"] == [1, 3, 4]


def test_whole_checkpoint_is_a_part_of_itself(folders, tmp_path):
    done = _cut(folders["bf16"], tmp_path / "out", layers=5, experts=8, keep_drafts=True)
    whole, part = stored_tensors(folders["bf16"]), stored_tensors(tmp_path / "out")
    assert part.keys() == whole.keys()
    assert all(_same_bits(part[name], whole[name]) for name in whole)
    assert _config(tmp_path / "out") == _config(folders["bf16"])
    assert list(done.remarks) == []


def test_what_nobody_asked_for_is_told_by_field(folders, tmp_path):
    done = _cut(folders["bf16"], tmp_path / "out", experts=2)
    assert list(done.remarks) == [
        "num_experts_per_tok is 2 instead of 3",
        "2 draft stages (mtp.*) are left out; --keep-drafts keeps them",
    ]
    config = _config(tmp_path / "out")
    assert not any(name.startswith("dspark_") for name in config)
    assert config["num_nextn_predict_layers"] == 0
    assert config["compress_ratios"] == [0, 4, 128]
    assert config["layer_types"] == ["a", "b", "c"]


def test_part_of_transformers_names_is_that_of_original_ones(tmp_path):
    parts = []
    for renamed in (False, True):
        source = write_tiny(tmp_path / f"{renamed}", ratios=(0, 4), transformers_names=renamed)
        _cut(source, tmp_path / f"out-{renamed}", 1, 3)
        parts.append(stored_tensors(tmp_path / f"out-{renamed}"))
    assert parts[0].keys() == parts[1].keys()
    assert all(_same_bits(parts[1][name], value) for name, value in parts[0].items())


@pytest.mark.parametrize(
    ("layers", "experts", "message"),
    [
        (0, 4, "--layers must be from 1 to 5, which the checkpoint has, found 0"),
        (6, 4, "--layers must be from 1 to 5, which the checkpoint has, found 6"),
        (3, 0, "--experts must be from 1 to 8, which the checkpoint has, found 0"),
        (3, 9, "--experts must be from 1 to 8, which the checkpoint has, found 9"),
    ],
)
def test_more_than_there_is_is_refused_by_option(folders, tmp_path, layers, experts, message):
    with pytest.raises(ConfigError) as caught:
        _cut(folders["bf16"], tmp_path / "out", layers, experts)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_draft_stages_that_look_at_more_layers_than_are_kept_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="draft stages look at 3 layers, so --keep-drafts needs --layers 3 or more"):
        _cut(folders["bf16"], tmp_path / "out", 2, keep_drafts=True)


def test_draft_stages_that_are_not_there_cannot_be_kept(folders, tmp_path):
    with pytest.raises(ConfigError, match="--keep-drafts was given, and the checkpoint has no draft stages"):
        _cut(folders["text"], tmp_path / "out", keep_drafts=True)


# --- hash tables


@pytest.mark.parametrize("num_experts", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_table_names_kept_experts_each_once_and_keeps_those_that_stay(num_experts, dtype):
    generator = torch.Generator().manual_seed(num_experts)
    table = torch.rand(500, 16, generator=generator).argsort(dim=1)[:, :4].to(dtype)
    active = min(4, num_experts)
    found = remapped(table, num_experts, active)
    assert found.dtype == dtype
    assert found.shape == (500, active)
    assert 0 <= int(found.min()) <= int(found.max()) < num_experts
    assert all(len(set(row)) == active for row in found.tolist())
    for before, after in zip(table.tolist(), found.tolist(), strict=True):
        stay = [expert for expert in before if expert < num_experts]
        assert after[: len(stay)] == stay[:active]
    if num_experts == 16:
        assert torch.equal(found, table)
    again = remapped(table, num_experts, active)
    assert torch.equal(again, found)


def test_table_of_a_row_is_what_the_rule_says():
    table = torch.tensor([[6, 2, 5], [9, 1, 4], [4, 8, 0]])
    # 2 stays, 6 -> 2, which is taken, so 3; 1 stays, 9 -> 1 taken -> 2; 0 stays, 4 -> 0 taken -> 1
    assert remapped(table, 4, 2).tolist() == [[2, 3], [1, 2], [0, 1]]
