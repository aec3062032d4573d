"""Descriptions of ModelSlim exports: what would change the arithmetic, or does not fit, is refused by name."""

import json
import logging

import pytest
import torch
from quantised_helpers import write_edited
from safetensors.torch import load_file

from deepspan.errors import WeightsError
from deepspan.ops.formats import Format
from deepspan.weights.checkpoint import DESCRIPTION_FILE
from deepspan.weights.description import read_description
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.tiny import write_tiny

FILE = "quant_model_weights-00001-of-00001.safetensors"
LINEAR, EXPERT = "layers.1.attn.wq_b", "layers.1.ffn.experts.5.w2"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("ascend")
    source = write_tiny(root / "plain", ratios=(0, 4))
    text = write_tiny(root / "text_plain", ratios=(0, 4), vision=False)
    folders = {name: write_quantised(source, root / name, RECIPES[name]) for name in ("w8a8", "w4a8")}
    return folders | {"plain": source, "text": write_quantised(text, root / "text", RECIPES["w8a8"])}


@pytest.fixture
def edited(written, tmp_path):
    def write(edit=lambda tensors: None, describe=None, recipe="w8a8", **config):
        return write_edited(written[recipe], tmp_path, edit, config=config, description=describe)

    return write


def _refused(folder, *parts):
    with pytest.raises(WeightsError) as caught:
        load_model(folder, dtype=torch.float32)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def _load(folder):
    return load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_loading_with_a_broken_description_is_refused_by_file(edited, text):
    folder = edited()
    (folder / DESCRIPTION_FILE).write_text(text)
    _refused(folder, DESCRIPTION_FILE)


def test_loading_with_a_description_of_nothing_is_refused(edited):
    folder = edited()
    (folder / DESCRIPTION_FILE).write_text(json.dumps({"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC"}))
    _refused(folder, "describes no tensor")


@pytest.mark.parametrize("label", ["W4A4_FLATQUANT_DYNAMIC", "WFP8AFP8_DYNAMIC", "W8A16", "float", "w8a8", ""])
def test_loading_with_an_unknown_label_is_refused_by_tensor_and_label(edited, label):
    folder = edited(describe=lambda raw: raw.update({f"{LINEAR}.weight": label}))
    _refused(folder, f"{LINEAR}.weight is {label!r}", "W8A8_DYNAMIC")


def test_loading_with_a_tensor_that_is_not_described_is_refused(edited):
    _refused(edited(describe=lambda raw: raw.pop("vision.norm.weight")), "vision.norm.weight", "is not described by")


def test_loading_with_a_described_tensor_that_is_not_there_is_refused(edited):
    folder = edited(describe=lambda raw: raw.update({"mtp.0.attn.wkv.weight": "FLOAT"}))
    _refused(folder, "describes mtp.0.attn.wkv.weight (1 in all), which no file holds")


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.ffn.gate.weight", "layers.1.attn_norm.weight", "image_end"])
def test_loading_with_a_scheme_where_nothing_is_multiplied_is_refused(edited, name):
    _refused(edited(describe=lambda raw: raw.update({name: "W8A8_DYNAMIC"})), f"says W8A8_DYNAMIC of {name}; expected")


def test_loading_with_a_scheme_in_the_vision_tower_is_refused(edited):
    name = "vision.blocks.0.mlp.w1.weight"
    _refused(edited(describe=lambda raw: raw.update({name: "W8A8_DYNAMIC"})), f"says W8A8_DYNAMIC of {name}; expected")


def test_loading_a_weight_and_a_scale_of_different_schemes_is_refused_by_both(edited):
    folder = edited(describe=lambda raw: raw.update({f"{LINEAR}.weight_scale": "FLOAT"}))
    _refused(folder, f"W8A8_DYNAMIC of {LINEAR}.weight and FLOAT of {LINEAR}.weight_scale")


def test_loading_w4a8_outside_of_experts_is_refused(edited):
    folder = edited(describe=lambda raw: raw.update({f"{LINEAR}.weight": "W4A8_DYNAMIC"}))
    _refused(folder, f"{LINEAR}.weight of {FILE} is W4A8_DYNAMIC", "routed experts")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layers.1.attn.wq_a", "layers.1.attn.wkv"),
        ("layers.1.ffn.shared_experts.w1", "layers.1.ffn.shared_experts.w3"),
        ("layers.1.ffn.experts.0.w1", "layers.1.ffn.experts.3.w3"),
    ],
)
def test_loading_fused_layers_that_disagree_is_refused_by_both(edited, written, first, second):
    plain = load_file(written["plain"] / "model.safetensors")

    def restore(tensors):
        tensors[f"{second}.weight"] = plain[f"{second}.weight"]
        del tensors[f"{second}.weight_scale"], tensors[f"{second}.weight_offset"]

    def describe(raw):
        raw[f"{second}.weight"] = "FLOAT"
        del raw[f"{second}.weight_scale"], raw[f"{second}.weight_offset"]

    _refused(edited(restore, describe), f"{first} is int8 and {second} is plain", "must have one format")


def test_loading_a_tensor_described_twice_and_differently_is_refused(edited):
    folder = edited(describe=lambda raw: raw.update({f"model.{LINEAR}.weight": "FLOAT"}))
    _refused(folder, f"says both W8A8_DYNAMIC and FLOAT of {LINEAR}.weight")


def test_loading_a_fused_tensor_is_refused(edited):
    name = "layers.1.ffn.shared_experts.gate_up_proj.weight"

    def add(tensors):
        tensors[name] = torch.zeros(64, 64)

    _refused(
        edited(add, lambda raw: raw.update({name: "W8A8_DYNAMIC"})), f"tensor {name} holds", "w1.weight and layers.1"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache_type", "C8"),
        ("kv_quant_type", "C8"),
        ("fa_quant_type", "FAKQuant"),
        ("indexer_quant_type", "INT8_DYNAMIC"),
        ("metadata", {"quarot": {"online": True}}),
    ],
)
def test_loading_with_arithmetic_that_is_not_served_is_refused_by_key(edited, key, value):
    _refused(edited(describe=lambda raw: raw.update({key: value})), key, "not served")


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.attn.k_proj.kv_cache_scale",
        "layers.1.attn.fa_k.scale",
        "layers.1.attn.indexer.q_rot.weight",
        "layers.1.attn.heads_rotation",
        "layers.1.attn.kronecker_rotation_m",
        "layers.1.attn.wo_b.div.mul_scale",
        f"{EXPERT}.weight_scale_second",
    ],
)
def test_loading_with_tensors_of_other_schemes_is_refused_by_name(edited, name):
    _refused(edited(describe=lambda raw: raw.update({name: "FLOAT"})), f"{name} means", "not served")


def test_loading_w4a8_in_groups_is_refused(edited):
    _refused(edited(describe=lambda raw: raw.update({"group_size": 256}), recipe="w4a8"), "group_size must be 0")


def test_loading_a_rotated_export_with_vision_is_refused(edited):
    rotation = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    _refused(edited(describe=lambda raw: raw.update({"optional": rotation})), "rotation", "vision tensors")


def test_loading_a_rotated_export_of_text_is_served(edited, caplog):
    rotation = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    folder = edited(describe=lambda raw: raw.update({"optional": rotation}), recipe="text")
    with caplog.at_level(logging.INFO):
        assert _load(folder).network.get_submodule(LINEAR).format is Format.INT8
    assert "rotated" in caplog.text


def test_loading_an_export_whose_configuration_says_fp8_is_refused(edited):
    folder = edited(quantization_config={"quant_method": "fp8"})
    _refused(folder, "quant_method fp8", DESCRIPTION_FILE)


def test_description_is_none_for_other_checkpoints(written):
    assert read_description(written["plain"], 2) is None
