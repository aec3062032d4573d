"""ModelSlim exports: names, the description and its refusals, offsets and static scales, files beside stale ones."""

import json
import logging

import pytest
import torch
from quantised_helpers import stored_tensors, write_edited
from safetensors.torch import load_file

from deepspan.config.model import parse_model_config
from deepspan.errors import WeightsError
from deepspan.ops.formats import Format, unpack_int4
from deepspan.weights.checkpoint import DESCRIPTION_FILE, INDEX_FILE
from deepspan.weights.description import read_description
from deepspan.weights.load import load_model
from deepspan.weights.names import canonical_names
from deepspan.weights.quantise import RECIPES, quantise_fp8, quantise_int8, static_tensors, write_quantised
from deepspan.weights.table import DraftKind, backbone_tensors, draft_tensors
from deepspan.weights.tiny import tiny_config, write_tiny

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


# --- names


def _every_name():
    raw = tiny_config(vocab_size=300, ratios=(0, 4, 128, 4, 0, 0, 0, 4, 0, 0, 4, 128))
    raw |= {"dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [1], "dspark_markov_rank": 4}
    config = parse_model_config(raw)
    table = (
        backbone_tensors(config) | draft_tensors(config, 2, DraftKind.DSPARK) | draft_tensors(config, 2, DraftKind.MTP)
    )
    return [*table, *(name.removesuffix("weight") + "weight_scale" for name in table if name.endswith(".weight"))]


def test_canonical_name_of_every_original_name_is_that_name():
    assert [name for name in _every_name() if canonical_names(name, 12) != [name]] == []


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model."])
def test_canonical_name_of_a_serving_name_is_the_original_one(prefix):
    renamed = {
        "embed_tokens.weight": "embed.weight",
        "lm_head.weight": "head.weight",
        "hc_head_fn": "hc_head_fn",
        "layers.3.input_layernorm.weight": "layers.3.attn_norm.weight",
        "layers.3.post_attention_layernorm.weight": "layers.3.ffn_norm.weight",
        "layers.3.self_attn.wq_b.weight_scale": "layers.3.attn.wq_b.weight_scale",
        "layers.3.self_attn.indexer.compressor.wkv.weight": "layers.3.attn.indexer.compressor.wkv.weight",
        "layers.3.mlp.experts.7.gate_proj.weight": "layers.3.ffn.experts.7.w1.weight",
        "layers.3.mlp.experts.7.down_proj.weight": "layers.3.ffn.experts.7.w2.weight",
        "layers.3.mlp.experts.7.up_proj.weight": "layers.3.ffn.experts.7.w3.weight",
        "layers.3.mlp.shared_experts.up_proj.weight_offset": "layers.3.ffn.shared_experts.w3.weight_offset",
        "layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
        "layers.3.mlp.gate.bias_vl": "layers.3.ffn.gate.bias_vl",
        "layers.12.self_attn.wkv.weight": "mtp.0.attn.wkv.weight",
        "layers.14.main_proj.weight": "mtp.2.main_proj.weight",
        "layers.0.mtp_block.self_attn.wkv.weight": "mtp.0.attn.wkv.weight",
        "layers.13.mtp_block.mlp.gate.weight": "mtp.1.ffn.gate.weight",
        "vision.blocks.0.attn.wo.weight": "vision.blocks.0.attn.wo.weight",
        "vision.blocks.0.mlp.w1.weight": "vision.blocks.0.mlp.w1.weight",
    }
    for name, original in renamed.items():
        assert canonical_names(prefix + name, 12) == [original]
        assert canonical_names(original, 12) == [original]


def test_canonical_names_of_fused_modules_are_those_of_their_parts():
    assert canonical_names("model.layers.1.mlp.shared_experts.gate_up_proj.weight", 4) == [
        "layers.1.ffn.shared_experts.w1.weight",
        "layers.1.ffn.shared_experts.w3.weight",
    ]
    assert canonical_names("layers.1.attn.fused_wqa_wkv.weight", 4) == [
        "layers.1.attn.wq_a.weight",
        "layers.1.attn.wkv.weight",
    ]


# --- what fits


def test_loading_an_export_keeps_int8_and_leaves_zero_offsets_out(written):
    loaded, stored = _load(written["w8a8"]), stored_tensors(written["w8a8"])
    state = loaded.network.state_dict()
    described = json.loads((written["w8a8"] / DESCRIPTION_FILE).read_text())
    quantised = [name for name, label in described.items() if label == "W8A8_DYNAMIC" and name in stored]
    assert len(quantised) == 3 * (2 * (3 + 3 + 3 * 8) + 1)
    for name in quantised:
        if name.endswith("offset"):
            assert "offsets are zero" in loaded.left_out[name]
        else:
            assert torch.equal(state[name], stored[name]), name
    assert state[f"{LINEAR}.weight"].dtype == torch.int8
    assert state["layers.1.attn.wo_a.weight"].dtype == torch.float32


def test_loading_an_export_in_w4a8_keeps_nibbles(written):
    loaded, plain = _load(written["w4a8"]), stored_tensors(written["plain"])
    module = loaded.network.get_submodule(EXPERT)
    assert module.format is Format.INT4
    assert module.weight.shape == (32, 32)
    decoded = unpack_int4(module.weight) * module.weight_scale
    weight = plain[f"{EXPERT}.weight"].float()
    assert float((decoded - weight).norm() / weight.norm()) < 0.2
    assert "shift" in loaded.left_out[f"{EXPERT}.scale_bias"]


def test_loading_an_export_with_names_of_a_serving_program(edited, written):
    def rename(tensors):
        for name in list(tensors):
            tensors[_serving(name)] = tensors.pop(name)

    def describe(raw):
        for name in [name for name in raw if "." in name or name.startswith(("hc_", "image_"))]:
            raw[_serving(name)] = raw.pop(name)

    def _serving(name):
        for old, new in (("ffn.experts.3.w1.", "mlp.experts.3.gate_proj."), (".attn.wq_b", ".self_attn.wq_b")):
            name = name.replace(old, new)
        return f"language_model.model.{name}" if name.startswith("layers.") else name

    found, expected = (_load(folder).network.state_dict() for folder in (edited(rename, describe), written["w8a8"]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_loading_an_export_described_under_fused_names(edited):
    def describe(raw):
        for part in ("w1", "w3"):
            del raw[f"layers.1.ffn.shared_experts.{part}.weight"]
        raw["model.layers.1.mlp.shared_experts.gate_up_proj.weight"] = "W8A8_DYNAMIC"

    network = _load(edited(describe=describe)).network
    assert network.get_submodule("layers.1.ffn.shared_experts.w3").format is Format.INT8


def test_loading_an_export_reads_its_own_files_and_not_the_index_of_its_source(edited, caplog):
    folder = edited()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"embed.weight": "model-00001-of-00001.safetensors"}}))
    with caplog.at_level(logging.WARNING):
        assert _load(folder).network.get_submodule(LINEAR).format is Format.INT8
    assert not caplog.records


def test_loading_an_export_of_several_files_without_an_index(written, tmp_path):
    source = write_tiny(tmp_path / "plain", ratios=(0,), num_shards=3)
    folder = write_quantised(source, tmp_path / "out", RECIPES["w8a8"])
    assert len(list(folder.glob("quant_model_weights-*.safetensors"))) == 3
    (folder / "quant_model_weights.safetensors.index.json").unlink()
    assert _load(folder).network.get_submodule("layers.0.attn.wq_a").format is Format.INT8


def test_loading_fp8_labelled_float_goes_by_what_is_stored(written, tmp_path):
    """Known of exports of draft stages: `wo_a` left in FP8, beside its scale, and called FLOAT."""
    name = "layers.1.attn.wo_a"

    def quantise(tensors):
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = quantise_fp8(tensors[f"{name}.weight"])

    folder = write_edited(
        written["w8a8"], tmp_path, quantise, description=lambda raw: raw.update({f"{name}.scale": "FLOAT"})
    )
    assert _load(folder).network.get_submodule(name).format is Format.FP8


@pytest.mark.parametrize("name", ["layers.1.attn.wo_a", "layers.1.attn.indexer.compressor.wgate"])
def test_loading_int8_where_no_op_takes_it_decodes_it_and_warns(edited, written, caplog, name):
    def quantise(tensors):
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantise_int8(tensors[f"{name}.weight"])

    labels = {f"{name}.weight": "W8A8_DYNAMIC", f"{name}.weight_scale": "W8A8_DYNAMIC"}
    with caplog.at_level(logging.WARNING):
        loaded = _load(edited(quantise, lambda raw: raw.update(labels)))
    assert f"{name} is quantised as int8" in caplog.text
    values, scale = quantise_int8(stored_tensors(written["plain"])[f"{name}.weight"])
    assert torch.equal(loaded.network.state_dict()[f"{name}.weight"], values.float() * scale)
    assert "folded" in loaded.left_out[f"{name}.weight_scale"]


def test_loading_weights_proj_in_int8_keeps_it(edited):
    name = "layers.1.attn.indexer.weights_proj"

    def quantise(tensors):
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantise_int8(tensors[f"{name}.weight"])

    labels = {f"{name}.weight": "W8A8_DYNAMIC", f"{name}.weight_scale": "W8A8_DYNAMIC"}
    assert _load(edited(quantise, lambda raw: raw.update(labels))).network.get_submodule(name).format is Format.INT8


# --- static scales


def _static(edited, change=lambda tensors: None, label="W8A8", drop=()):
    """The export with one layer in static W8A8; its tensors are changed by `change` before."""

    def quantise(tensors):
        plain = tensors[f"{LINEAR}.weight"] * tensors[f"{LINEAR}.weight_scale"]
        new = static_tensors(plain, 0.05, 3, None)
        change(new)
        for name in [name for name in tensors if name.startswith(f"{LINEAR}.") and label == "W8A8"]:
            del tensors[name]
        tensors.update({f"{LINEAR}.{last}": tensor for last, tensor in new.items() if last not in drop})

    def describe(raw):
        for name in [name for name in raw if name.startswith(f"{LINEAR}.")]:
            del raw[name]
        lasts = ["weight", "input_scale", "input_offset", "quant_bias", "deq_scale"]
        lasts += ["weight_scale", "weight_offset"] if label != "W8A8" else []
        raw.update({f"{LINEAR}.{last}": label for last in lasts if last not in drop})

    return edited(quantise, describe)


def test_loading_a_static_layer_keeps_all_that_it_needs(edited):
    module = _load(_static(edited)).network.get_submodule(LINEAR)
    assert module.format is Format.INT8_STATIC
    assert module.quant_bias.dtype == torch.int32
    assert module.input_offset.tolist() == [3.0]
    assert bool(module(torch.ones(2, 32)).isfinite().all())


def test_loading_a_static_scale_stored_as_bits_gives_the_number(edited):
    def to_bits(new):
        expected.append(new["deq_scale"])
        new["deq_scale"] = new["deq_scale"].view(torch.int32).long() & 0xFFFFFFFF

    expected: list[torch.Tensor] = []
    module = _load(_static(edited, to_bits)).network.get_submodule(LINEAR)
    assert torch.equal(module.deq_scale, expected[0])


@pytest.mark.parametrize("bits", [-1, 1 << 32])
def test_loading_a_static_scale_outside_32_bits_is_refused(edited, bits):
    def spoil(new):
        new["deq_scale"] = torch.full(new["deq_scale"].shape, bits)

    _refused(_static(edited, spoil), f"{LINEAR}.deq_scale ({FILE}) holds {bits}", "32 bits")


def test_loading_a_static_layer_without_its_bias_names_it_missing(edited):
    _refused(_static(edited, drop=("quant_bias",)), f"missing: {LINEAR}.quant_bias")


def test_loading_a_mixed_layer_takes_the_scale_per_token(edited):
    loaded = _load(_static(edited, label="W8A8_MIX"))
    assert loaded.network.get_submodule(LINEAR).format is Format.INT8
    assert "per token" in loaded.left_out[f"{LINEAR}.deq_scale"]


def test_loading_static_experts_is_refused(edited):
    names = ("weight", "weight_scale", "weight_offset")
    _refused(edited(describe=lambda raw: raw.update({f"{EXPERT}.{last}": "W8A8" for last in names})),
             f"{EXPERT}.weight of {FILE} is W8A8 (static); expected W8A8_DYNAMIC or FLOAT")  # fmt: skip


# --- values that cannot be right


def test_loading_an_offset_that_is_not_zero_is_refused_by_tensor_file_and_value(edited):
    def spoil(tensors):
        tensors[f"{EXPERT}.weight_offset"][3, 0] = 2.0

    _refused(edited(spoil), f"{EXPERT}.weight_offset ({FILE}) holds 2.0; expected 0 everywhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_a_row_scale_that_is_no_positive_number_is_refused(edited, module, value):
    def spoil(tensors):
        tensors[f"{module}.weight_scale"][2, 0] = value

    _refused(edited(spoil), f"{module}.weight_scale ({FILE})", f"{value} at [2, 0]")


@pytest.mark.parametrize("shape", [(1,), (64, 2), (1, 64)])
def test_loading_row_scales_of_wrong_shape_is_refused(edited, shape):
    def reshape(tensors):
        tensors[f"{EXPERT}.weight_scale"] = torch.ones(shape)

    _refused(edited(reshape), f"{EXPERT}.weight_scale has shape {list(shape)}, expected [64, 1] ({FILE})")


def test_loading_row_scales_without_a_second_dimension_is_no_fault(edited):
    def flatten(tensors):
        tensors[f"{EXPERT}.weight_scale"] = tensors[f"{EXPERT}.weight_scale"].flatten()

    assert _load(edited(flatten)).network.get_submodule(EXPERT).weight_scale.shape == (64,)


def test_loading_a_plain_tensor_called_int8_is_refused(edited, written):
    def widen(tensors):
        tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].bfloat16()

    _refused(edited(widen), f"{EXPERT}.weight is stored as BF16, expected I8")


def test_loading_int8_called_float_is_refused(edited):
    names = ("weight", "weight_scale", "weight_offset")
    folder = edited(describe=lambda raw: raw.update({f"{LINEAR}.{last}": "FLOAT" for last in names}))
    _refused(folder, f"{LINEAR}.weight of {FILE} is stored as I8, {DESCRIPTION_FILE} says FLOAT")


# --- descriptions that cannot be right


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
