"""The two naming schemes: every original name has one place, and every place leads back to it."""

import pytest
from released import flash_vision

from deepspan.config.model import parse_model_config
from deepspan.weights.names import Place, canonical_names, is_transformers_naming, locate, originals_at
from deepspan.weights.table import DraftKind, backbone_tensors, draft_tensors
from deepspan.weights.tiny import tiny_config

TINY = {
    "vision": tiny_config(vocab_size=300),
    "text_only": tiny_config(vocab_size=300, vision=False),
    "all_hash_layers": tiny_config(vocab_size=300, ratios=(0, 4), overrides={"num_hash_layers": 2}),
    "no_hash_layer": tiny_config(vocab_size=300, ratios=(128, 0), overrides={"num_hash_layers": 0}),
    "twelve_layers": tiny_config(vocab_size=300, ratios=(0,) * 12, vision=False, overrides={"n_routed_experts": 12}),
    "released_sizes": flash_vision()
    | {"num_hidden_layers": 4, "compress_ratios": [0, 0, 4, 128], "dspark_target_layer_ids": [3]},
}


@pytest.mark.parametrize("raw", TINY.values(), ids=TINY)
def test_names_of_every_tensor_round_trip(raw):
    config = parse_model_config(raw)
    names = list(backbone_tensors(config))
    places = {name: locate(name) for name in names}
    assert len(set(places.values())) == len(names)
    keys = {place.key for place in places.values()}
    back = [name for key in keys for name in originals_at(key, config.n_routed_experts)]
    assert sorted(back) == sorted(names)
    for key in keys:
        assert all(places[name].key == key for name in originals_at(key, config.n_routed_experts))


@pytest.mark.parametrize(
    ("original", "renamed"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_base", "model.hc_head.hc_base"),
        ("layers.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("layers.3.hc_attn_fn", "model.layers.3.attn_hc.fn"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        ("layers.3.attn.wq_a.weight", "model.layers.3.self_attn.q_a_proj.weight"),
        ("layers.3.attn.attn_sink", "model.layers.3.self_attn.sinks"),
        ("layers.3.attn.compressor.ape", "model.layers.3.self_attn.compressor.position_bias"),
        ("layers.3.attn.compressor.norm.weight", "model.layers.3.self_attn.compressor.kv_norm.weight"),
        (
            "layers.2.attn.indexer.compressor.wgate.weight",
            "model.layers.2.self_attn.compressor.indexer.gate_proj.weight",
        ),
        ("layers.2.attn.indexer.wq_b.weight", "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight"),
        (
            "layers.2.attn.indexer.weights_proj.weight",
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        ("layers.0.ffn.gate.tid2eid", "model.layers.0.mlp.gate.tid2eid"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("layers.3.ffn.gate.bias_vl", "model.layers.3.mlp.gate.bias_vl"),
        ("layers.3.ffn.shared_experts.w3.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"),
        ("vision.blocks.1.attn.wqkv.bias", "vision.blocks.1.attn.wqkv.bias"),
        ("image_newline", "image_newline"),
    ],
)
def test_name_of_known_tensor_is_the_documented_one(original, renamed):
    assert locate(original) == Place(key=renamed)
    assert originals_at(renamed, num_experts=8) == [original]


@pytest.mark.parametrize(
    ("weight", "key", "part", "num_parts"),
    [("w1", "gate_up_proj", 0, 2), ("w3", "gate_up_proj", 1, 2), ("w2", "down_proj", 0, 1)],
)
def test_name_of_expert_is_a_part_of_the_stack(weight, key, part, num_parts):
    place = locate(f"layers.10.ffn.experts.201.{weight}.weight")
    assert place == Place(key=f"model.layers.10.mlp.experts.{key}", expert=201, part=part, num_parts=num_parts)


@pytest.mark.parametrize("name", ["vision.norm.weight", "aligner.w1.bias", "image_start"])
def test_name_of_vision_tensor_may_have_the_model_prefix(name):
    assert originals_at(f"model.{name}", num_experts=8) == originals_at(name, num_experts=8) == [name]


def test_name_of_draft_tensor_has_no_place():
    config = parse_model_config(flash_vision() | {"n_routed_experts": 8})
    for kind in DraftKind:
        for name in draft_tensors(config, 2, kind):
            with pytest.raises(KeyError, match=name):
                locate(name)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.gate.bias_v",
        "layers.0.ffn.gate.biases",
        "layers.0.attn.wq_a",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.x.attn_norm.weight",
        "embed.weight.scale",
        "model.embed.weight",
        "image_middle",
        "",
    ],
)
def test_name_of_neither_scheme_has_no_place(name):
    with pytest.raises(KeyError):
        locate(name)
    with pytest.raises(KeyError):
        originals_at(name, num_experts=8)


def test_naming_of_a_checkpoint_is_told_by_its_text_tensors():
    names = list(backbone_tensors(parse_model_config(TINY["vision"])))
    assert not is_transformers_naming(iter(names))
    assert is_transformers_naming(locate(name).key for name in names)
    assert not is_transformers_naming(iter(["model.vision.norm.weight", "model.image_end", "embed.weight"]))


# --- names of serving programs


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
