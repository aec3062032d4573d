"""Model configuration: the released files as they are, and every refusal by the name of the field."""

import json
import logging
import re
from dataclasses import replace

import pytest
from released import RELEASED_VISION, flash, flash_dspark, flash_vision

from deepspan.config.model import DraftConfig, RopeConfig, load_model_config, parse_model_config
from deepspan.config.quantisation import QuantisationConfig
from deepspan.errors import ConfigError

OPTIONAL = frozenset(
    """architectures attention_bias attention_dropout expert_dtype hidden_act initializer_range n_shared_experts
    norm_topk_prob num_key_value_heads num_nextn_predict_layers quantization_config scoring_func tie_word_embeddings
    topk_method use_cache""".split()
)
REQUIRED = sorted(set(flash_vision()) - OPTIONAL)
THETAS = ("rope_theta", "compress_rope_theta")  # numbers that the file writes as integers
REQUIRED_INTEGERS = [name for name in REQUIRED if type(flash_vision()[name]) is int and name not in THETAS]
REQUIRED_NUMBERS = [*THETAS, *(name for name in REQUIRED if type(flash_vision()[name]) is float)]
ROPE_FIELDS = sorted(flash()["rope_scaling"])


def _refused(raw, *parts):
    """Parsing `raw` is refused with a message that holds every part."""
    with pytest.raises(ConfigError) as caught:
        parse_model_config(raw)
    for part in parts:
        assert part in str(caught.value)


def _edited(base, **fields):
    return base() | fields


def _rope(**fields):
    raw = flash()
    raw["rope_scaling"] |= fields
    return raw


# --- the released files


def test_config_of_released_text_model_keeps_every_value():
    config = parse_model_config(flash())
    for name in (*REQUIRED_INTEGERS, *REQUIRED_NUMBERS):
        if hasattr(config, name):
            assert getattr(config, name) == flash()[name], name
    assert config.compress_ratios == (0, 0, *(4, 128) * 20, 4)
    assert config.ratios_in_use() == (4, 128)
    assert config.rope == RopeConfig(
        theta=10000.0,
        compress_theta=160000.0,
        factor=16.0,
        original_max_position_embeddings=65536,
        beta_fast=32.0,
        beta_slow=1.0,
    )
    assert config.torch_dtype == "bfloat16"
    assert config.vision is None
    assert config.draft is None


def test_config_of_released_vision_model_keeps_vision_and_draft_fields():
    config = parse_model_config(flash_vision())
    assert config.vision == RELEASED_VISION
    assert config.vision.head_dim == 64
    assert config.draft == DraftConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256
    )
    assert config.rms_norm_eps == 1e-20


@pytest.mark.parametrize("base", [flash, flash_dspark, flash_vision])
def test_config_of_released_model_raises_no_warning(base, caplog):
    with caplog.at_level(logging.WARNING):
        config = parse_model_config(base())
    assert not caplog.records
    assert len(config.compress_ratios) == config.num_hidden_layers == 43


def test_config_with_stale_stage_count_does_not_read_it():
    assert parse_model_config(_edited(flash_dspark, num_nextn_predict_layers=7)) == parse_model_config(flash_dspark())


def test_config_with_rope_type_key_is_accepted():
    raw = flash()
    raw["rope_scaling"]["rope_type"] = raw["rope_scaling"].pop("type")
    assert parse_model_config(raw) == parse_model_config(flash())
    assert parse_model_config(_rope(rope_type="yarn")) == parse_model_config(flash())


def test_config_with_dtype_key_is_accepted():
    raw = flash()
    raw["dtype"] = raw.pop("torch_dtype")
    assert parse_model_config(raw) == parse_model_config(flash())


def test_config_with_vision_switched_off_is_text_only_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        config = parse_model_config(_edited(flash_vision, vision_n_layers=0))
    assert config.vision is None
    assert not caplog.records


@pytest.mark.parametrize("name", sorted(OPTIONAL - {"expert_dtype", "quantization_config"}))
def test_config_with_null_optional_field_equals_released(name):
    assert parse_model_config(flash() | {name: None}) == parse_model_config(flash())


# --- quantisation


def test_config_of_released_model_says_how_it_is_quantised():
    assert parse_model_config(flash()).quantisation == QuantisationConfig(method="fp8", expert_dtype="fp4")


@pytest.mark.parametrize(("name", "part"), [("quantization_config", "method"), ("expert_dtype", "expert_dtype")])
def test_config_without_a_quantisation_field_differs_in_that_alone(name, part):
    released = parse_model_config(flash())
    without = replace(released, quantisation=replace(released.quantisation, **{part: None}))
    assert parse_model_config(flash() | {name: None}) == without


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", "compressed-tensors"),
        ("quant_method", None),
        ("weight_block_size", [64, 64]),
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
    ],
)
def test_config_of_another_quantisation_is_refused_by_field(field, value):
    raw = flash()
    raw["quantization_config"][field] = value
    _refused(raw, f"quantization_config.{field}")


def test_config_of_unknown_expert_dtype_is_refused():
    _refused(flash() | {"expert_dtype": "int4"}, "expert_dtype must be one of fp4, fp8, found 'int4'")


def test_config_of_unknown_quantisation_field_warns_of_it(caplog):
    raw = flash()
    raw["quantization_config"]["modules"] = ["x"]
    with caplog.at_level(logging.WARNING):
        parse_model_config(raw)
    assert "quantization_config.modules" in caplog.text


# --- unknown fields


def test_config_with_unknown_field_warns_and_goes_on(caplog):
    raw = _edited(flash, hidden_sizes=1)
    raw["rope_scaling"]["long_factor"] = 2
    with caplog.at_level(logging.WARNING):
        assert parse_model_config(raw) == parse_model_config(flash())
    assert [name for name in ("hidden_sizes", "rope_scaling.long_factor") if name in caplog.text] == [
        "hidden_sizes",
        "rope_scaling.long_factor",
    ]
    assert len(caplog.records) == 2


# --- other models


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v4.1", "deepseek_v4_1", "deepseek_v41_vision"])
def test_config_of_v41_is_refused_as_v41(model_type):
    _refused(_edited(flash, model_type=model_type), "model_type", repr(model_type), "V4.1")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v4_mtp", "DEEPSEEK_V4", "", None, 4, ["deepseek_v4"]])
def test_config_of_other_model_type_is_refused(model_type):
    _refused(_edited(flash, model_type=model_type), "model_type", repr(model_type))


@pytest.mark.parametrize(
    "architectures",
    [["DeepseekV41ForCausalLM"], ["DeepseekV3ForCausalLM"], ["DeepseekV4ForCausalLM", "Other"], [], "Other", 3],
)
def test_config_of_other_architecture_is_refused(architectures):
    _refused(_edited(flash, architectures=architectures), "architectures", repr(architectures))


@pytest.mark.parametrize("name", ["kv_lora_rank", "n_group", "topk_group", "first_k_dense_replace"])
def test_config_with_field_of_another_family_is_refused(name):
    _refused(_edited(flash, **{name: 1}), name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 8),
        ("n_shared_experts", 2),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
    ],
)
def test_config_with_unserved_choice_is_refused(name, value):
    _refused(_edited(flash, **{name: value}), f"{name} must be", repr(value))


# --- missing fields and wrong types


@pytest.mark.parametrize("name", REQUIRED)
def test_config_without_required_field_is_refused_by_name(name):
    raw = flash_vision()
    del raw[name]
    _refused(raw, name)
    _refused(raw | {name: None}, name)


@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_config_without_rope_field_is_refused_by_name(name):
    raw = flash()
    del raw["rope_scaling"][name]
    _refused(raw, f"rope_scaling.{name} is missing")


@pytest.mark.parametrize("value", [True, "64", 64.0, [64], {}])
@pytest.mark.parametrize("name", REQUIRED_INTEGERS)
def test_config_with_integer_field_of_wrong_type_is_refused(name, value):
    _refused(_edited(flash_vision, **{name: value}), f"{name} must be an integer", repr(value))


@pytest.mark.parametrize("name", REQUIRED_INTEGERS)
def test_config_with_negative_integer_field_is_refused(name):
    _refused(_edited(flash_vision, **{name: -1}), f"{name} must be at least", "-1")


@pytest.mark.parametrize("value", [True, "1.0", [1.0]])
@pytest.mark.parametrize("name", REQUIRED_NUMBERS)
def test_config_with_number_field_of_wrong_type_is_refused(name, value):
    _refused(_edited(flash_vision, **{name: value}), f"{name} must be a number", repr(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
@pytest.mark.parametrize("name", REQUIRED_NUMBERS)
def test_config_with_number_field_that_is_not_finite_is_refused(name, value):
    _refused(_edited(flash_vision, **{name: value}), f"{name} must be a finite number")


@pytest.mark.parametrize("value", [0, -1.5])
@pytest.mark.parametrize("name", REQUIRED_NUMBERS)
def test_config_with_number_field_that_is_not_positive_is_refused(name, value):
    _refused(_edited(flash_vision, **{name: value}), f"{name} must be above", f"{value:g}")


@pytest.mark.parametrize("value", ["float8", "torch.bfloat16", 16, ["bfloat16"]])
def test_config_with_other_dtype_is_refused(value):
    _refused(_edited(flash, torch_dtype=value), "torch_dtype must be one of", repr(value))


# --- ratios


@pytest.mark.parametrize("ratio", [1, 2, 3, 6, 127, 130, -1, -4])
def test_config_with_unsupported_ratio_is_refused(ratio):
    ratios = flash()["compress_ratios"]
    ratios[5] = ratio
    _refused(_edited(flash, compress_ratios=ratios), f"compress_ratios holds {ratio}")


@pytest.mark.parametrize("ratios", [[], [0] * 42])
def test_config_with_too_few_ratios_is_refused(ratios):
    _refused(_edited(flash, compress_ratios=ratios), f"compress_ratios has {len(ratios)} entries", "43")


@pytest.mark.parametrize("ratios", [4, "0,4", [0] * 42 + [True], [0] * 42 + ["4"], [0] * 42 + [4.0], {"0": 4}])
def test_config_with_ratios_of_wrong_type_is_refused(ratios):
    _refused(_edited(flash, compress_ratios=ratios), "compress_ratios must be a list of integers")


def test_config_with_ratio_for_draft_stage_is_refused():
    ratios = flash_vision()["compress_ratios"]
    ratios[44] = 4
    _refused(_edited(flash_vision, compress_ratios=ratios), "compress_ratios of draft stages must be 0", "[0, 4, 0]")


@pytest.mark.parametrize("num_extra", [0, 1, 3])
def test_config_with_ratios_beyond_the_backbone_cuts_them_off(num_extra):
    ratios = flash()["compress_ratios"][:43]
    config = parse_model_config(_edited(flash, compress_ratios=ratios + [0] * num_extra))
    assert config.compress_ratios == tuple(ratios)


# --- values that cannot belong together


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"o_groups": 7}, ("o_groups 7", "num_attention_heads 64")),
        ({"num_attention_heads": 60}, ("o_groups 8", "num_attention_heads 60")),
        ({"head_dim": 32}, ("qk_rope_head_dim 64", "head_dim 32")),
        ({"index_head_dim": 32}, ("qk_rope_head_dim 64", "index_head_dim 32")),
        ({"qk_rope_head_dim": 63}, ("qk_rope_head_dim must be even", "63")),
        ({"num_experts_per_tok": 257}, ("num_experts_per_tok 257", "n_routed_experts 256")),
        ({"num_hash_layers": 44}, ("num_hash_layers 44", "num_hidden_layers 43")),
        ({"bos_token_id": 129280}, ("bos_token_id 129280", "vocab_size 129280")),
        ({"eos_token_id": 129280}, ("eos_token_id 129280", "vocab_size 129280")),
        ({"vision_n_heads": 3}, ("vision_n_heads 3", "vision_dim 1024")),
        ({"vision_n_heads": 512}, ("vision_n_heads 512", "multiple of 4")),
        ({"dspark_noise_token_id": 129280}, ("dspark_noise_token_id 129280", "vocab_size 129280")),
        ({"dspark_target_layer_ids": [40, 43]}, ("dspark_target_layer_ids holds 43", "num_hidden_layers is 43")),
        ({"dspark_target_layer_ids": [-1]}, ("dspark_target_layer_ids holds -1",)),
        ({"dspark_target_layer_ids": []}, ("dspark_target_layer_ids is empty",)),
    ],
)
def test_config_with_impossible_sizes_is_refused(fields, parts):
    _refused(flash_vision() | fields, *parts)


# --- rope


@pytest.mark.parametrize("kind", ["linear", "dynamic", "default", "YARN", 1])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_config_with_other_rope_type_is_refused(key, kind):
    _refused(_rope(**{key: kind}), "rope_scaling.", "type must be", repr(kind))


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim", "attention_factor"])
def test_config_with_attention_factor_is_refused(name):
    _refused(_rope(**{name: 1.0}), f"rope_scaling.{name}")


@pytest.mark.parametrize(
    ("name", "value"), [("factor", 0.5), ("beta_fast", 0), ("beta_slow", -1), ("original_max_position_embeddings", 0)]
)
def test_config_with_impossible_rope_value_is_refused(name, value):
    _refused(_rope(**{name: value}), f"rope_scaling.{name}")


@pytest.mark.parametrize("value", ["yarn", ["yarn"], 16])
def test_config_with_rope_scaling_of_wrong_type_is_refused(value):
    _refused(_edited(flash, rope_scaling=value), "rope_scaling must be an object", repr(value))


# --- switches of vision and drafts


def test_config_with_vision_fields_but_no_switch_is_refused():
    raw = flash_vision()
    del raw["vision_n_layers"]
    _refused(raw, "vision_dim is set", "vision_n_layers is absent")


@pytest.mark.parametrize("value", [False, "", 0.0, [], -1])
def test_config_with_vision_switch_of_wrong_type_is_refused(value):
    _refused(_edited(flash_vision, vision_n_layers=value), "vision_n_layers must be")


def test_config_with_null_wh_ratio_is_refused():
    _refused(_edited(flash_vision, vision_max_wh_ratio=None), "vision_max_wh_ratio is missing")


def test_config_with_dspark_fields_but_no_switch_is_refused():
    raw = flash_dspark()
    del raw["dspark_block_size"]
    _refused(raw, "dspark_markov_rank is set", "dspark_block_size is absent")


# --- files


def test_config_file_is_read_by_its_path_or_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(flash_vision()))
    assert load_model_config(tmp_path) == load_model_config(str(file)) == parse_model_config(flash_vision())


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere/config.json"])
def test_config_file_that_does_not_exist_is_refused_by_path(tmp_path, path):
    with pytest.raises(ConfigError, match=f"no config.json at {re.escape(str(tmp_path / path))}"):
        load_model_config(tmp_path / path)


def test_config_file_that_cannot_be_read_is_refused_by_path(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"{'a': 1}", b"\xff\xfe\x00", b'{"a": 1} x'])
def test_config_file_that_is_not_json_is_refused_by_path(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("null", "NoneType"), ('"x"', "str"), ("3", "int")])
def test_config_file_that_is_no_object_is_refused(tmp_path, text, kind):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"holds {kind}, expected a JSON object"):
        load_model_config(tmp_path)
