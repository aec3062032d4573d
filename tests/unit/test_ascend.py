"""ModelSlim exports: names, the description and its refusals, offsets and static scales, files beside stale ones."""

import json
import logging

import pytest
import torch
from quantised_helpers import stored_tensors, write_edited

from deepspan.errors import WeightsError
from deepspan.ops.formats import Format, unpack_int4
from deepspan.weights.checkpoint import DESCRIPTION_FILE, INDEX_FILE
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, quantise_fp8, quantise_int8, static_tensors, write_quantised
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
