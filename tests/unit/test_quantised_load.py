"""Loading FP8 and FP4: forms told by companions, names of scales, refusals that name tensor, file and both sides."""

import json

import pytest
import torch
from quantised_helpers import decoded_tensors, stored_tensors, write_edited
from safetensors.torch import save_file

from deepspan.config.model import parse_model_config
from deepspan.errors import WeightsError
from deepspan.model.packed_linear import PackedLinear
from deepspan.ops.formats import Format, decode_fp4, decode_fp8
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, quantise_fp4, quantise_fp8, write_quantised
from deepspan.weights.table import Storage, backbone_tensors
from deepspan.weights.tiny import file_dtype, tiny_config, write_tiny

FILE = "model-00001-of-00001.safetensors"
LINEAR, EXPERT = "layers.1.attn.wq_b", "layers.1.ffn.experts.5.w2"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    source = write_tiny(root / "plain", ratios=(0, 4))
    return {name: write_quantised(source, root / name, RECIPES[name]) for name in ("fp8-fp4", "fp8")} | {
        "plain": source
    }


@pytest.fixture
def edited(written, tmp_path):
    def write(edit, recipe="fp8-fp4", **config):
        return write_edited(written[recipe], tmp_path, edit, config=config)

    return write


def _refused(folder, *parts):
    with pytest.raises(WeightsError) as caught:
        load_model(folder, dtype=torch.float32)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def _state(folder, dtype=torch.float32):
    return load_model(folder, dtype=dtype).network.state_dict()


def _assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    differ = [n for n in expected if not torch.equal(found[n].view(torch.uint8), expected[n].view(torch.uint8))
              or found[n].dtype != expected[n].dtype]  # fmt: skip
    assert differ == []


# --- what fits


@pytest.mark.parametrize("recipe", ["fp8-fp4", "fp8"])
def test_loading_keeps_quantised_tensors_as_they_are_stored(written, recipe):
    state, stored = _state(written[recipe]), stored_tensors(written[recipe])
    packed = {name for name in stored if name.endswith(".scale")}
    assert len(packed) == 2 * (5 + 3 + 3 * 8) + 1
    for name in packed | {name.removesuffix("scale") + "weight" for name in packed}:
        assert state[name].dtype == stored[name].dtype, name
        assert torch.equal(state[name].view(torch.uint8), stored[name].view(torch.uint8)), name


@pytest.mark.parametrize("recipe", ["fp8-fp4", "fp8"])
def test_loaded_layers_decode_to_what_the_file_says(written, recipe):
    network, plain = load_model(written[recipe], dtype=torch.float32).network, decoded_tensors(written[recipe])
    layers = {name: module for name, module in network.named_modules() if isinstance(module, PackedLinear)}
    for name, module in layers.items():
        decode = decode_fp4 if module.format is Format.FP4 else decode_fp8
        assert torch.equal(decode(module.operand), plain[f"{name}.weight"]), name
    assert len(layers) == 2 * (5 + 3 + 3 * 8) + 1


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_accepts_other_names_of_scales(edited, written, suffix, module):
    def rename(tensors):
        tensors[f"{module}.{suffix}"] = tensors.pop(f"{module}.scale")

    _assert_same_state(_state(edited(rename)), _state(written["fp8-fp4"]))


def test_loading_accepts_nibbles_and_scales_stored_as_unsigned_bytes(edited, written):
    def retype(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].view(torch.uint8)

    _assert_same_state(_state(edited(retype)), _state(written["fp8-fp4"]))


def test_loading_accepts_plain_layers_beside_quantised_ones(edited, written):
    """Dense layers of a block may be left as they were; the whole of a layer's experts too."""
    plain = stored_tensors(written["plain"])

    def restore(tensors):
        for name in [n for n in tensors if n.startswith(("layers.0.ffn.experts.", f"{LINEAR}."))]:
            del tensors[name]
            if name.endswith(".weight"):
                tensors[name] = plain[name]

    network = load_model(edited(restore), dtype=torch.float32).network
    assert network.get_submodule(LINEAR).format is None
    assert network.get_submodule("layers.0.ffn.experts.3.w1").format is None
    assert network.get_submodule(EXPERT).format is Format.FP4


def test_loading_transformers_names_with_scales_of_dense_layers(written, tmp_path):
    folder = write_tiny(tmp_path / "renamed", ratios=(0, 4), transformers_names=True)
    (file,) = folder.glob("*.safetensors")
    tensors = stored_tensors(folder)
    name = "model.layers.1.self_attn.q_b_proj"
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantise_fp8(tensors[f"{name}.weight"])
    save_file(tensors, file)
    state = _state(folder)
    assert torch.equal(state[f"{LINEAR}.weight"], tensors[f"{name}.weight"])
    assert torch.equal(state[f"{LINEAR}.scale"].float(), tensors[f"{name}.weight_scale_inv"].float())


def test_loading_with_draft_stages_checks_their_companions_too(tmp_path):
    source = write_tiny(tmp_path / "plain", ratios=(0,), draft_stages=1)
    folder = write_quantised(source, tmp_path / "out", RECIPES["fp8-fp4"])
    copy = tmp_path / "copy"
    copy.mkdir()
    name = "mtp.0.main_proj.scale"
    _refused(write_edited(folder, copy, lambda tensors: tensors.pop(name)), f"missing: {name}")


# --- scales that cannot be right


@pytest.mark.parametrize(
    ("module", "recipe", "shape", "expected"),
    [
        (LINEAR, "fp8-fp4", (2, 1), [1, 1]),
        (LINEAR, "fp8-fp4", (1,), [1, 1]),
        (EXPERT, "fp8-fp4", (64, 2), [64, 1]),
        (EXPERT, "fp8-fp4", (1, 64), [64, 1]),
        (EXPERT, "fp8", (64, 1), [1, 1]),
    ],
)
def test_loading_a_scale_of_wrong_shape_is_refused_with_both_shapes(edited, module, recipe, shape, expected):
    def reshape(tensors):
        dtype = tensors[f"{module}.scale"].dtype
        tensors[f"{module}.scale"] = torch.ones(shape).to(dtype)

    _refused(edited(reshape, recipe), f"{module}.scale has shape {list(shape)}, expected {expected} ({FILE})")


def test_loading_a_packed_weight_of_wrong_shape_is_refused_with_both_shapes(edited):
    def widen(tensors):
        tensors[f"{EXPERT}.weight"] = torch.zeros(64, 32, dtype=torch.int8)

    _refused(edited(widen), f"{EXPERT}.weight has shape [64, 32], expected [64, 16] ({FILE})")


@pytest.mark.parametrize("module", ["layers.1.attn.wkv", "layers.0.ffn.experts.0.w1", EXPERT])
def test_loading_without_a_quantised_weight_names_it_missing(edited, module):
    _refused(edited(lambda tensors: tensors.pop(f"{module}.weight")), f"missing: {module}.weight")


@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_without_a_scale_names_it_missing(edited, module):
    _refused(edited(lambda tensors: tensors.pop(f"{module}.scale")), f"missing: {module}.scale")


@pytest.mark.parametrize(
    ("module", "recipe", "dtype", "expected"),
    [
        (LINEAR, "fp8-fp4", torch.bfloat16, "F32 or F8_E8M0"),
        (EXPERT, "fp8-fp4", torch.float32, "F8_E8M0 or U8"),
        (EXPERT, "fp8", torch.float8_e8m0fnu, "F32"),  # the sheet: fp8 experts have fp32 scales
    ],
)
def test_loading_a_scale_of_wrong_dtype_is_refused_with_both(edited, module, recipe, dtype, expected):
    def retype(tensors):
        tensors[f"{module}.scale"] = tensors[f"{module}.scale"].float().to(dtype)

    found = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e8m0fnu: "F8_E8M0"}[dtype]
    _refused(edited(retype, recipe), f"{module}.scale is stored as {found}, expected {expected} ({FILE})")


@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_a_one_byte_scale_of_nan_is_refused_by_tensor_file_and_place(edited, module):
    def spoil(tensors):
        tensors[f"{module}.scale"].view(torch.uint8)[0, 0] = 255

    _refused(edited(spoil), f"{module}.scale ({FILE})", "holds 1 scales that are no positive number", "nan at [0, 0]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_an_fp32_scale_that_is_no_positive_number_is_refused(edited, module, value):
    def spoil(tensors):
        tensors[f"{module}.scale"][0, 0] = value

    _refused(edited(spoil, "fp8"), f"{module}.scale ({FILE})", f"{value} at [0, 0]")


def test_loading_the_smallest_scale_is_no_fault(edited):
    def shrink(tensors):
        tensors[f"{EXPERT}.scale"].view(torch.uint8)[:] = 0

    assert float(_state(edited(shrink))[f"{EXPERT}.scale"].float().max()) == 2.0**-127


def test_loading_a_truncated_file_is_refused_by_name(written, tmp_path):
    folder = write_edited(written["fp8-fp4"], tmp_path)
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1])
    _refused(folder, f"{FILE} is not a complete safetensors file")


# --- forms that cannot be right


def test_loading_two_scales_for_one_weight_is_refused_by_both(edited):
    def double(tensors):
        tensors[f"{LINEAR}.weight_scale_inv"] = tensors[f"{LINEAR}.scale"].clone()

    _refused(edited(double), f"{LINEAR}.scale and {LINEAR}.weight_scale_inv both are the scale of {LINEAR}")


def test_loading_a_plain_weight_with_a_scale_is_refused_by_both(edited):
    def widen(tensors):
        tensors[f"{LINEAR}.weight"] = tensors[f"{LINEAR}.weight"].bfloat16()

    _refused(edited(widen), f"{LINEAR}.weight of {FILE} is stored as BF16 and has {LINEAR}.scale")


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.ffn.gate.weight", "vision.blocks.0.mlp.w1.weight"])
def test_loading_fp8_where_the_release_has_none_is_refused(edited, name):
    def quantise(tensors):
        weight = quantise_fp8(tensors[name])
        tensors[name], tensors[name.removesuffix("weight") + "scale"] = weight

    scale = name.removesuffix("weight") + "scale"
    _refused(edited(quantise), f"{name} is stored as F8_E4M3, expected BF16", f"unexpected: {scale}")


def test_loading_fp4_in_a_dense_layer_is_refused(edited, written):
    def quantise(tensors):
        tensors[f"{LINEAR}.weight"], tensors[f"{LINEAR}.scale"] = quantise_fp4(torch.ones(128, 32))

    _refused(edited(quantise), f"{LINEAR}.weight is stored as I8, expected BF16")


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ("layers.1.ffn.experts.0.w1", "layers.1.ffn.experts.5.w2", "experts.5.w2"),
        ("layers.1.attn.wq_a", "layers.1.attn.wkv", "attn.wkv"),
        ("layers.1.ffn.shared_experts.w1", "layers.1.ffn.shared_experts.w3", "shared_experts.w3"),
    ],
)
def test_loading_layers_that_disagree_is_refused_by_both(edited, written, first, second, part):
    plain = stored_tensors(written["plain"])

    def restore(tensors):
        del tensors[f"{second}.scale"]
        tensors[f"{second}.weight"] = plain[f"{second}.weight"]

    _refused(edited(restore), f"{first} is", f"{second} is plain", "must have one format")


def test_loading_some_experts_in_fp8_and_some_in_fp4_is_refused(edited):
    def mix(tensors):
        weight = torch.ones(64, 32)
        tensors[f"{EXPERT}.weight"], tensors[f"{EXPERT}.scale"] = quantise_fp8(weight, torch.float32)

    _refused(edited(mix, expert_dtype=None), "layers.1.ffn.experts.0.w1 is fp4", f"{EXPERT} is fp8")


@pytest.mark.parametrize(("recipe", "says"), [("fp8-fp4", "fp8"), ("fp8", "fp4")])
def test_loading_experts_against_their_configuration_is_refused(edited, recipe, says):
    _refused(edited(lambda tensors: None, recipe, expert_dtype=says), f"expert_dtype in config.json says {says}")


@pytest.mark.parametrize("module", [LINEAR, EXPERT])
def test_loading_int8_without_a_description_is_refused(edited, module):
    def quantise(tensors):
        del tensors[f"{module}.scale"]
        tensors[f"{module}.weight"] = torch.ones(64, 32, dtype=torch.int8)
        tensors[f"{module}.weight_scale"] = torch.ones(64, 1)

    _refused(edited(quantise), f"{module}.weight of {FILE} is stored as I8 with a weight_scale", "no quant_model_descr")


# --- size


@pytest.fixture(scope="module")
def real_size(tmp_path_factory):
    """One layer with expert matrices of the release's size, in random bytes."""
    folder = tmp_path_factory.mktemp("real_size")
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 4, "num_hash_layers": 0}
    raw = tiny_config(vocab_size=300, ratios=(0,), vision=False, overrides=sizes)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in backbone_tensors(parse_model_config(raw)).items():
        rows, columns = (*spec.shape, 1)[:2]
        scale = name.removesuffix("weight") + "scale"
        if spec.storage is Storage.FP4:
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=generator)
            tensors[scale] = torch.full((rows, columns // 32), 2.0**-6).to(torch.float8_e8m0fnu)
        elif spec.storage is Storage.FP8:
            tensors[name] = torch.zeros(spec.shape, dtype=torch.float8_e4m3fn)
            tensors[scale] = torch.ones(-(-rows // 128), -(-columns // 128)).to(torch.float8_e8m0fnu)
        else:
            tensors[name] = torch.ones(spec.shape, dtype=file_dtype(spec))
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_loaded_experts_of_real_size_take_the_bytes_of_the_file(real_size):
    network = load_model(real_size, dtype=torch.bfloat16).network
    in_file = (real_size / FILE).stat().st_size
    assert abs(sum(parameter.nbytes for parameter in network.parameters()) - in_file) < 0.1 * in_file
    experts = [parameter for name, parameter in network.named_parameters() if ".experts." in name]
    assert sum(parameter.nbytes for parameter in experts) == 4 * 3 * 4096 * 2048 * 17 // 32  # 4 bits and a byte per 32


def test_loaded_experts_of_real_size_map_the_file(real_size):
    """Their addresses differ from each other as their places in the file do: they are one mapping of it."""
    with (real_size / FILE).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    state = load_model(real_size, dtype=torch.float32).network.state_dict()
    names = [name for name in state if ".experts." in name or name.endswith((".scale", "wq_a.weight"))]
    assert len({state[name].data_ptr() - header[name]["data_offsets"][0] for name in names}) == 1
    assert len(names) == 4 * 6 + 5 + 3 + 1
