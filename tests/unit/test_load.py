"""Loading: every tensor once and in its place, what is left out and why, refusals by name, memory mapping."""

import json
import logging
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspan.errors import ConfigError, WeightsError
from deepspan.weights.checkpoint import INDEX_FILE
from deepspan.weights.load import load_model
from deepspan.weights.tiny import write_tiny

FILE = "model.safetensors"
RATIOS = (0, 4)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints that nobody edits: by kind, their folder."""
    kinds = {
        "vision": {},
        "text": {"vision": False},
        "sharded": {"num_shards": 5},
        "transformers": {"transformers_names": True},
        "drafts": {"draft_stages": 3},
        "text_drafts": {"vision": False, "draft_stages": 2},
    }
    root = tmp_path_factory.mktemp("load")
    return {kind: write_tiny(root / kind, ratios=RATIOS, **arguments) for kind, arguments in kinds.items()}


@pytest.fixture
def edited(written, tmp_path):
    """Write a copy of a checkpoint whose tensors were changed by `edit`, and return its folder."""

    def write(edit, kind="vision", **config):
        tensors = load_file(written[kind] / FILE)
        edit(tensors)
        save_file(tensors, tmp_path / FILE)
        raw = json.loads((written[kind] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | config))
        return tmp_path

    return write


def _refused(folder, *parts):
    with pytest.raises(WeightsError) as caught:
        load_model(folder, dtype=torch.float32)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def _state(folder, dtype=torch.float32):
    return load_model(folder, dtype=dtype).network.state_dict()


# --- what fits


def test_loaded_network_holds_the_values_of_the_file(written):
    stored, state = load_file(written["vision"] / FILE), _state(written["vision"])
    assert stored.keys() - state.keys() == {"layers.0.ffn.gate.bias"}
    for name, value in state.items():
        assert torch.equal(value, stored[name].to(value.dtype)), name


@pytest.mark.parametrize("kind", ["sharded", "transformers", "drafts"])
def test_loaded_network_is_the_same_however_it_is_stored(written, kind):
    base, other = _state(written["vision"]), _state(written[kind])
    assert base.keys() == other.keys()
    assert [name for name in base if not torch.equal(base[name], other[name])] == []


def test_loaded_network_is_ready_for_inference(written):
    loaded = load_model(written["vision"], dtype=torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in loaded.network.parameters())
    assert not loaded.network.training
    assert not any(value.is_meta for value in loaded.network.state_dict().values())
    assert loaded.network.embed.weight.dtype == torch.bfloat16
    assert loaded.network.head.weight.dtype == torch.float32
    assert loaded.network.hc_head_fn.dtype == torch.float32


def test_loading_reports_progress_once_per_tensor(written):
    seen = []
    load_model(written["text"], dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    num_tensors = len(load_file(written["text"] / FILE))
    assert seen == [(done, num_tensors) for done in range(1, num_tensors + 1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loading_converts_other_float_dtypes(edited, dtype):
    def convert(tensors):
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(dtype)

    assert _state(edited(convert))["embed.weight"].dtype == torch.float32


def test_loading_accepts_a_hash_table_of_32_bits(edited, written):
    def narrow(tensors):
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()

    name = "layers.0.ffn.gate.tid2eid"
    assert torch.equal(_state(edited(narrow))[name], _state(written["vision"])[name])


@pytest.mark.parametrize("prefixed", [("vision.", "aligner.", "image_"), ("vision.",), ("image_",)])
def test_loading_accepts_prefixed_vision_names(edited, written, prefixed):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith(prefixed)]:
            tensors[f"model.{name}"] = tensors.pop(name)

    base, other = _state(written["vision"]), _state(edited(rename))
    assert [name for name in base if not torch.equal(base[name], other[name])] == []


# --- what is left out, and why


def test_loading_leaves_out_the_bias_of_hash_layers_of_vision_models(written):
    loaded = load_model(written["vision"], dtype=torch.float32)
    assert list(loaded.left_out) == ["layers.0.ffn.gate.bias"]
    assert "hash layers" in loaded.left_out["layers.0.ffn.gate.bias"]
    assert "layers.0.ffn.gate.bias_vl" in loaded.network.state_dict()


def test_loading_leaves_out_nothing_of_text_models(written):
    assert load_model(written["text"], dtype=torch.float32).left_out == {}


def test_loading_without_the_unused_bias_names_it_missing(edited):
    _refused(edited(lambda tensors: tensors.pop("layers.0.ffn.gate.bias")), "missing: layers.0.ffn.gate.bias")


@pytest.mark.parametrize(("kind", "num_stages"), [("drafts", 3), ("text_drafts", 2)])
def test_loading_leaves_out_draft_stages_counted_from_names(written, kind, num_stages, caplog):
    with caplog.at_level(logging.INFO):
        loaded = load_model(written[kind], dtype=torch.float32)
    drafts = {name: reason for name, reason in loaded.left_out.items() if name.startswith("mtp.")}
    assert drafts.keys() == {name for name in load_file(written[kind] / FILE) if name.startswith("mtp.")}
    assert {name.split(".")[1] for name in drafts} == {str(stage) for stage in range(num_stages)}
    assert set(drafts.values()) == {"drafting is off"}
    assert all(f"tensor {name} is not loaded" in caplog.text for name in drafts)


def test_loading_counts_draft_stages_whatever_the_stage_field_says(edited):
    folder = edited(lambda tensors: None, "drafts", num_nextn_predict_layers=1)
    assert "mtp.2.norm.weight" in load_model(folder, dtype=torch.float32).left_out


def test_loading_leaves_out_a_plain_mtp_stage(edited):
    def to_mtp(tensors):
        hidden = tensors["norm.weight"].shape[0]
        for name in [name for name in tensors if name.startswith(("mtp.1.", "mtp.2."))]:
            if "hc_head" in name or name == "mtp.2.norm.weight":
                tensors[name.replace("mtp.2.", "mtp.0.")] = tensors[name]
            del tensors[name]
        for name in ("main_proj", "main_norm"):
            del tensors[f"mtp.0.{name}.weight"]
        for name in ("e_proj", "h_proj"):
            tensors[f"mtp.0.{name}.weight"] = torch.zeros(hidden, hidden, dtype=torch.bfloat16)
        for name in ("enorm", "hnorm"):
            tensors[f"mtp.0.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)

    left_out = load_model(edited(to_mtp, "drafts"), dtype=torch.float32).left_out
    assert {"mtp.0.e_proj.weight", "mtp.0.norm.weight", "mtp.0.ffn.gate.bias"} <= left_out.keys()


@pytest.mark.parametrize("name", ["mtp.0.emb.tok_emb.weight", "mtp.0.embed.weight", "mtp.2.head.weight"])
def test_loading_leaves_out_copies_of_embedding_and_head_of_the_right_shape(edited, name):
    def copy(tensors):
        tensors[name] = tensors["head.weight"].clone()

    assert "a copy" in load_model(edited(copy, "drafts"), dtype=torch.float32).left_out[name]

    def cut(tensors):
        copy(tensors)
        tensors[name] = tensors[name][:-1].contiguous()

    _refused(edited(cut, "drafts"), f"wrong shape: {name}")


def test_loading_with_a_gap_in_the_draft_stages_is_refused(edited):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("mtp.1.")]:
            del tensors[name]

    _refused(edited(drop, "drafts"), "without gaps", "mtp.[0, 2]")


def test_loading_with_an_incomplete_draft_stage_is_refused_by_tensor(edited):
    name = "mtp.1.attn.wq_a.weight"
    _refused(edited(lambda tensors: tensors.pop(name), "drafts"), f"missing: {name}")


def test_loading_draft_stages_without_their_fields_is_refused(edited):
    fields = dict.fromkeys(
        ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
    )
    _refused(edited(lambda tensors: None, "drafts", **fields), "DSpark draft stages", "dspark_block_size")


# --- what does not fit


@pytest.mark.parametrize(
    "name",
    ["embed.weight", "hc_head_scale", "layers.1.attn.indexer.compressor.ape", "vision.norm.weight", "image_pad"],
)
def test_loading_with_missing_tensor_is_refused_by_name(edited, name):
    message = _refused(edited(lambda tensors: tensors.pop(name)), f"missing: {name}")
    assert "unexpected" not in message


@pytest.mark.parametrize(
    "name", ["vision.stray.weight", "layers.2.attn_norm.weight", "layers.0.ffn.gate.bias_v", "extra", "model.extra"]
)
def test_loading_with_unexpected_tensor_is_refused_by_name(edited, name):
    def add(tensors):
        tensors[name] = torch.zeros(1)

    message = _refused(edited(add), f"unexpected: {name}")
    assert "missing" not in message


def test_loading_with_vision_tensors_of_a_text_configuration_is_refused(edited):
    message = _refused(edited(lambda tensors: None, vision_n_layers=0), "unexpected: aligner.w1.bias", "more")
    assert "missing" not in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [("norm.weight", (65,)), ("layers.1.attn.wq_b.weight", (32, 128)), ("image_end", (1, 64)), ("hc_head_scale", ())],
)
def test_loading_with_wrong_shape_is_refused_by_name_and_both_shapes(edited, name, shape):
    def reshape(tensors):
        expected.append(list(tensors[name].shape))
        tensors[name] = torch.zeros(shape)

    expected: list[list[int]] = []
    _refused(edited(reshape), f"wrong shape: {name} has shape {list(shape)}, expected {expected[0]}")


def test_loading_reports_all_kinds_of_faults_together(edited):
    def spoil(tensors):
        tensors["norms.weight"] = tensors.pop("norm.weight")
        tensors["embed.weight"] = torch.zeros(3, 3)
        tensors["head.weight"] = tensors["head.weight"].int()

    _refused(
        edited(spoil), "missing: norm.weight", "unexpected: norms.weight", "wrong shape: embed", "wrong dtype: head"
    )


def test_loading_with_many_faults_names_the_first_and_counts_the_rest(edited):
    message = _refused(edited(lambda tensors: None, num_hidden_layers=1, compress_ratios=[0]), "unexpected: layers.1.")
    assert message.count("layers.1.") == 8
    assert message.endswith("more")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e8m0fnu, "F8_E8M0"), (torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL")],
)
def test_loading_a_tensor_of_a_dtype_without_meaning_is_refused_by_name_dtype_and_file(edited, dtype, name):
    def quantise(tensors):
        tensors["layers.0.attn.wq_a.weight"] = torch.zeros(32, 64).to(dtype)

    _refused(edited(quantise), f"layers.0.attn.wq_a.weight is stored as {name}, expected BF16 or F16 or F32 ({FILE})")


def test_loading_a_float_tensor_stored_as_integers_is_refused_by_name(edited):
    def spoil(tensors):
        tensors["embed.weight"] = tensors["embed.weight"].long()

    _refused(edited(spoil), "wrong dtype: embed.weight is stored as I64, expected BF16 or F16 or F32")


def test_loading_a_hash_table_stored_as_floats_is_refused_by_name(edited):
    def spoil(tensors):
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()

    _refused(edited(spoil), "wrong dtype: layers.0.ffn.gate.tid2eid is stored as F32, expected I32 or I64")


@pytest.mark.parametrize("expert", [-1, 8])
def test_loading_a_hash_table_with_an_unknown_expert_is_refused_by_name(edited, expert):
    def spoil(tensors):
        tensors["layers.0.ffn.gate.tid2eid"][7, 1] = expert

    _refused(edited(spoil), "layers.0.ffn.gate.tid2eid holds expert ids", str(expert), "n_routed_experts is 8")


@pytest.mark.parametrize("name", ["vision.norm.weight", "image_end"])
def test_loading_a_tensor_under_both_vision_names_is_refused_by_both(edited, name):
    def double(tensors):
        tensors[f"model.{name}"] = tensors[name].clone()

    _refused(edited(double), f"model.{name}", f" both hold {name}")


def test_loading_a_tensor_in_two_shards_is_refused(written, tmp_path):
    tensors = load_file(written["vision"] / FILE)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"norm.weight": tensors["norm.weight"]}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"norm.weight": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((written["vision"] / "config.json").read_bytes())
    _refused(tmp_path, "tensor norm.weight is in a.safetensors and again in b.safetensors")


def test_loading_a_folder_without_configuration_or_weights_is_refused(written, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_bytes((written["vision"] / "config.json").read_bytes())
    _refused(tmp_path, "no safetensors files")


# --- transformers names


def test_loading_transformers_names_with_a_foreign_tensor_is_refused_by_name(edited):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary.inv_freq"] = torch.zeros(4)

    _refused(edited(add, "transformers"), "unexpected tensor model.layers.0.self_attn.rotary.inv_freq")


def test_loading_mixed_names_is_refused_by_name(edited):
    def rename(tensors):
        tensors["norm.weight"] = tensors.pop("model.norm.weight")

    _refused(edited(rename, "transformers"), "unexpected tensor norm.weight")


@pytest.mark.parametrize("shape", [(9, 64, 64), (7, 64, 64), (8, 63, 64), (8, 64, 63), (512, 64)])
def test_loading_a_stack_of_experts_of_wrong_shape_is_refused(edited, shape):
    def reshape(tensors):
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(shape)

    _refused(edited(reshape, "transformers"), "wrong shape: layers.1.ffn.experts.0.w1.weight has shape")


# --- memory mapping


def test_loading_in_the_stored_dtype_maps_the_file(written):
    """Addresses of all tensors differ from each other as their places in the file do: they are one mapping of it.

    A copied tensor would lie anywhere. This holds on every system and needs no large file, unlike a look at the
    process's memory.
    """
    data = (written["vision"] / FILE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    state = _state(written["vision"], torch.bfloat16)
    names = [name for name in state if header[name]["dtype"] == {torch.bfloat16: "BF16"}.get(state[name].dtype, "F32")]
    bases = {state[name].data_ptr() - header[name]["data_offsets"][0] for name in names}
    assert len(bases) == 1
    assert sum(state[name].nbytes for name in names) > 0.8 * len(data)


def test_loading_stacked_experts_in_the_stored_dtype_maps_the_file(written):
    state = _state(written["transformers"], torch.bfloat16)
    experts = [state[f"layers.0.ffn.experts.{expert}.w2.weight"] for expert in range(8)]
    steps = [second.data_ptr() - first.data_ptr() for first, second in pairwise(experts)]
    assert set(steps) == {experts[0].nbytes}
