"""The tensor table: published totals of the releases, from the configuration alone, and the shapes of the network."""

import math
from collections import Counter

import pytest
import torch
from released import flash, flash_dspark, flash_vision

from deepspan.config.model import parse_model_config
from deepspan.model.network import DeepseekV4
from deepspan.ops.registry import reference_ops
from deepspan.weights.table import DraftKind, Storage, backbone_tensors, draft_tensors
from deepspan.weights.tiny import tiny_config

FLOAT_BYTES = {Storage.BF16: ("BF16", 2), Storage.FP32: ("F32", 4), Storage.INT64: ("I64", 8)}
EXPERT = 3 * 4096 * 2048


def _stored(table):
    """The released files' (name, dtype, bytes) of every tensor, scales of the block formats included."""
    for name, spec in table.items():
        num_values = math.prod(spec.shape)
        if spec.storage is Storage.FP8:
            yield name, "F8_E4M3", num_values
            yield name.replace(".weight", ".scale"), "F8_E8M0", math.prod(math.ceil(n / 128) for n in spec.shape)
        elif spec.storage is Storage.FP4:
            rows, columns = spec.shape
            yield name, "I8", rows * columns // 2
            yield name.replace(".weight", ".scale"), "F8_E8M0", rows * columns // 32
        else:
            dtype, size = FLOAT_BYTES[spec.storage]
            yield name, dtype, num_values * size


def _totals(table):
    stored = list(_stored(table))
    return len(stored), sum(size for _, _, size in stored)


def _num_parameters(table, prefix="", without=("tid2eid",)):
    return sum(
        math.prod(spec.shape)
        for name, spec in table.items()
        if name.startswith(prefix) and not any(part in name for part in without)
    )


@pytest.fixture(scope="module")
def text():
    return backbone_tensors(parse_model_config(flash()))


@pytest.fixture(scope="module")
def mtp():
    return draft_tensors(parse_model_config(flash()), 1, DraftKind.MTP)


@pytest.fixture(scope="module")
def text_drafts():
    return draft_tensors(parse_model_config(flash_dspark()), 3, DraftKind.DSPARK)


@pytest.fixture(scope="module")
def vision():
    return backbone_tensors(parse_model_config(flash_vision()))


@pytest.fixture(scope="module")
def vision_drafts():
    return draft_tensors(parse_model_config(flash_vision()), 3, DraftKind.DSPARK)


# --- totals of the released files


def test_table_of_text_release_has_published_totals(text, mtp):
    assert _totals(text | mtp) == (69_187, 159_609_485_896)


def test_table_of_text_release_has_published_count_per_dtype(text, mtp):
    counts = Counter(dtype for _, dtype, _ in _stored(text | mtp))
    assert counts == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I8": 33_792, "I64": 3}


def test_table_of_text_release_has_published_count_per_layer(text, mtp):
    names = [name for name, _, _ in _stored(text | mtp)]
    counts = Counter(name.split(".", 2)[1] if name.startswith("layers.") else name.split(".")[0] for name in names)
    kinds = {0: 1565, 4: 1576, 128: 1569}
    for layer, ratio in enumerate(parse_model_config(flash()).compress_ratios):
        assert counts[str(layer)] == kinds[ratio], layer
    assert counts["mtp"] == 1575
    assert sum(1 for name in names if not name.startswith(("layers.", "mtp."))) == 6


def test_table_of_vision_release_has_published_extra_over_text(text, text_drafts, vision, vision_drafts):
    base, extended = _totals(text | text_drafts), _totals(vision | vision_drafts)
    assert (extended[0] - base[0], extended[1] - base[1]) == (316, 932_836_352)


def test_table_of_vision_release_has_published_total_size(vision, vision_drafts):
    assert _totals(vision | vision_drafts)[1] == 167_811_372_792


def test_table_of_vision_release_has_published_bytes_per_part(vision, vision_drafts):
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, _, size in _stored(vision | vision_drafts):
        part = name.split(".")[0].split("_")[0]
        part = "bias_vl" if name.endswith("bias_vl") else part
        sizes[part] += size
        counts[part] += 1
    assert {part: sizes[part] for part in ("vision", "aligner", "image", "bias_vl")} == {
        "vision": 823_685_120,
        "aligner": 109_068_288,
        "image": 32_768,
        "bias_vl": 47_104,
    }
    assert [counts[part] for part in ("vision", "aligner", "image", "bias_vl")] == [259, 4, 4, 46]


def test_table_of_draft_stages_has_published_counts(text_drafts, vision_drafts):
    assert _totals(text_drafts)[0] == 4705
    assert _totals(vision_drafts)[0] == 4708
    assert set(vision_drafts) - set(text_drafts) == {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}


def test_table_of_draft_stages_adds_the_drafter_once(text_drafts):
    layer_parts = ("attn", "ffn", "hc_attn", "hc_ffn")
    extra = {
        name: spec.shape for name, spec in text_drafts.items() if not name.split(".", 2)[2].startswith(layer_parts)
    }
    assert extra == {
        "mtp.0.main_proj.weight": (4096, 12288),
        "mtp.0.main_norm.weight": (4096,),
        "mtp.2.norm.weight": (4096,),
        "mtp.2.hc_head_fn": (4, 16384),
        "mtp.2.hc_head_base": (4,),
        "mtp.2.hc_head_scale": (1,),
        "mtp.2.markov_head.markov_w1.weight": (129280, 256),
        "mtp.2.markov_head.markov_w2.weight": (129280, 256),
        "mtp.2.confidence_head.proj.weight": (1, 4352),
    }


def test_table_without_draft_stages_is_empty():
    for kind in DraftKind:
        assert draft_tensors(parse_model_config(flash_vision()), 0, kind) == {}


# --- parameters


def test_table_of_text_release_has_published_parameter_counts(text, mtp):
    assert _num_parameters(text | mtp) == 290_942_289_362
    assert _num_parameters(mtp) == 6_610_048_891
    assert _num_parameters(text) == 284_332_240_471
    routed = _num_parameters(text) - _num_parameters(text, without=("tid2eid", ".experts."))
    assert routed == 277_025_390_592 == 43 * 256 * EXPERT
    assert _num_parameters(text) - routed + 43 * 6 * EXPERT == 13_799_632_471
    assert _num_parameters(text, "embed.") == _num_parameters(text, "head.") == 529_530_880


def test_table_of_text_release_has_published_parameter_counts_per_part(text):
    attention = [_num_parameters(text, f"layers.{layer}.attn.") for layer in (0, 2, 3)]
    assert attention == [106_956_352, 126_098_624, 111_216_704]
    assert _num_parameters(text, "layers.2.attn.compressor.") == 8_393_216
    assert _num_parameters(text, "layers.2.attn.indexer.") == 10_749_056
    assert _num_parameters(text, "layers.3.attn.compressor.") == 4_260_352
    assert _num_parameters(text, "layers.7.ffn.experts.255.") == EXPERT
    assert _num_parameters(text, "layers.7.ffn.shared_experts.") == EXPERT


def test_table_of_vision_release_has_published_parameter_counts(vision):
    parts = [_num_parameters(vision, prefix) for prefix in ("vision.", "aligner.", "image_")]
    assert parts == [411_842_560, 54_534_144, 16_384]


# --- hash layers


def test_table_of_text_release_gives_hash_layers_a_table_and_others_a_bias(text):
    tables = [name for name in text if name.endswith("gate.tid2eid")]
    biases = [name for name in text if name.endswith("gate.bias")]
    assert tables == [f"layers.{layer}.ffn.gate.tid2eid" for layer in range(3)]
    assert biases == [f"layers.{layer}.ffn.gate.bias" for layer in range(3, 43)]
    assert text[tables[0]].shape == (129280, 6)


def test_table_of_vision_release_marks_the_bias_of_hash_layers_unused(vision):
    assert [name for name, spec in vision.items() if spec.unused] == [f"layers.{n}.ffn.gate.bias" for n in range(3)]


# --- the network


CONFIGS = {
    "released_schedule": {"ratios": (0, 4, 128, 4)},
    "text_only": {"ratios": (0, 4, 128, 4), "vision": False},
    "window_only": {"ratios": (0,), "vision": False},
    "one_indexed_layer": {"ratios": (4,)},
    "one_far_layer": {"ratios": (16,), "vision": False},
    "no_hash_layer": {"ratios": (0, 4), "overrides": {"num_hash_layers": 0}},
    "no_hash_layer_text_only": {"ratios": (0, 4), "vision": False, "overrides": {"num_hash_layers": 0}},
    "all_hash_layers": {"ratios": (0, 4, 128), "overrides": {"num_hash_layers": 3}},
    "all_hash_layers_text_only": {"ratios": (0, 4, 128), "vision": False, "overrides": {"num_hash_layers": 3}},
    "other_sizes": {
        "ratios": (128, 4, 0, 8),
        "overrides": {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "o_groups": 3,
            "head_dim": 24,
            "o_lora_rank": 10,
            "q_lora_rank": 20,
            "index_n_heads": 5,
            "index_head_dim": 12,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "hc_mult": 2,
            "vision_n_layers": 3,
            "vision_dim": 24,
            "vision_n_heads": 3,
            "vision_inter_dim": 20,
            "vision_patch_size": 6,
            "vision_downsample_ratio": 2,
        },
    },
}


def _check_network(config):
    """Names, shapes and which tensors are integers are those of the table."""
    with torch.device("meta"):
        network = DeepseekV4(config, reference_ops(), torch.bfloat16)
    built = {name: (tuple(value.shape), value.is_floating_point()) for name, value in network.state_dict().items()}
    assert built == {
        name: (spec.shape, spec.storage is not Storage.INT64)
        for name, spec in backbone_tensors(config).items()
        if not spec.unused
    }


@pytest.mark.parametrize("arguments", CONFIGS.values(), ids=CONFIGS)
def test_table_of_tiny_configuration_equals_the_network(arguments):
    _check_network(parse_model_config(tiny_config(vocab_size=300, **arguments)))


def test_table_of_released_vision_sizes_equals_the_network():
    few_layers = {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4], "dspark_target_layer_ids": [4]}
    _check_network(parse_model_config(flash_vision() | few_layers))
