"""The oracle against transformers, against golden values, and against laws the formulas must obey."""

import math
import warnings

import numpy as np
import pytest

from oracle import encode_image, forward, layout, network, run, to_emission_order, vision
from oracle.tiny import TEXT_CONFIG, VISION_CONFIG, random_weights

IMAGE_CONFIG = TEXT_CONFIG | VISION_CONFIG | {"sliding_window": 8, "index_topk": 4}

RENAMED = [  # applied in this order, so that the longer name goes first where it contains another
    (".attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".attn.indexer.weights_proj", ".self_attn.compressor.indexer.scorer.weights_proj"),
    (".attn.indexer.wq_b", ".self_attn.compressor.indexer.q_b_proj"),
    (".attn.compressor.", ".self_attn.compressor."),
    (".wgate.", ".gate_proj."),
    (".ape", ".position_bias"),
    ("compressor.norm.", "compressor.kv_norm."),
    ("indexer.norm.", "indexer.kv_norm."),
    (".attn.", ".self_attn."),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".wkv.", ".kv_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".attn_sink", ".sinks"),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".ffn.", ".mlp."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."),
    ("hc_head_", "hc_head.hc_"),
    ("embed.", "embed_tokens."),
]


def to_transformers(config, weights):
    """The same weights under transformers' names: renamed, and the experts of a layer stacked."""
    import torch

    out = {}
    for name, value in weights.items():
        if ".experts." not in name:
            for old, new in RENAMED:
                name = name.replace(old, new)  # noqa: PLW2901
            out["lm_head.weight" if name == "head.weight" else "model." + name] = value
    for layer in range(config["num_hidden_layers"]):
        experts = [f"layers.{layer}.ffn.experts.{e}." for e in range(config["n_routed_experts"])]
        gate_up = [np.concatenate([weights[e + "w1.weight"], weights[e + "w3.weight"]]) for e in experts]
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(gate_up)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack([weights[e + "w2.weight"] for e in experts])
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in out.items()}


def transformers_logits(config, weights, ids):
    """Logits of transformers' model, with every float32 it asks for widened to float64."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    class Widen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            wide = {torch.float32: torch.float64}
            args = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
            kwargs = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
            return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)

    scaling = config["rope_scaling"] | {"rope_type": "yarn"}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(), torch.no_grad(), Widen():
            warnings.simplefilter("ignore")
            hf_config = DeepseekV4Config(
                **config | {"rope_scaling": scaling}, attn_implementation="eager", experts_implementation="eager"
            )
            model = DeepseekV4ForCausalLM(hf_config).double().eval()
            missing = model.load_state_dict(to_transformers(config, weights), strict=False)
            assert not missing.unexpected_keys
            assert all("inv_freq" in key for key in missing.missing_keys)
            return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(
    "change",
    [{}, {"swiglu_limit": 0.3, "compress_ratios": [4, 128, 0, 4], "num_hash_layers": 2, "rms_norm_eps": 1e-3}],
    ids=["plain", "clamped"],
)
def test_network_on_text_equals_transformers(change):
    config = TEXT_CONFIG | change
    weights = random_weights(config, seed=1)
    ids = np.random.default_rng(2).integers(0, config["vocab_size"], 300).tolist()
    ours = forward(config, weights, ids, [layout.TEXT] * len(ids), None, [])
    theirs = transformers_logits(config, weights, ids)
    assert ours["logits"].std() > 0.5
    assert np.abs(ours["logits"] - theirs).max() < 1e-10


# --- layout and visibility --------------------------------------------------------------------------------------

GOLDEN_LAYOUTS = {
    (1, 1): ("SIPNPE", "0"),
    (1, 2): ("SIPIPNPPPE", "0 1"),
    (2, 1): ("SIINNE", "0 1"),
    (2, 2): ("SIIIINNPPE", "0 2 1 3"),
    (2, 3): ("SIIIIIINNE", "0 3 1 4 2 5"),
    (3, 2): ("SIIIINNIPIPNPE", "0 2 1 3 4 5"),
    (4, 5): ("SIIIIIIIIIINNIIIIIIIIIINNE", "0 5 1 6 2 7 3 8 4 9 10 15 11 16 12 17 13 18 14 19"),
    (5, 4): ("SIIIIIIIINNIIIIIIIINNIPIPIPIPNPPPE", "0 4 1 5 2 6 3 7 8 12 9 13 10 14 11 15 16 17 18 19"),
}


@pytest.mark.parametrize("position", [3, 4, 5, 6])
@pytest.mark.parametrize("size", GOLDEN_LAYOUTS)
def test_image_block_equals_golden_layout(size, position):
    kinds, order = layout.image_block(*size, position)
    letters, golden_order = GOLDEN_LAYOUTS[size]
    lead = 3 - position % 4
    assert "".join("SPINE"[kind] for kind in kinds) == "P" * lead + letters
    assert order == [int(i) for i in golden_order.split()]
    assert (len(kinds) - lead) % 4 == 2


def interval(query, window, spans):
    visible = layout.raw_visible(query, window, spans)
    low, high = min(visible), max(visible)
    assert len(visible) == high - low + 1
    return low, high


def test_raw_visible_of_two_images_equals_golden_ranges():
    _, kinds = layout.assemble([[9] * 5, (4, 5), [9] * 3, (1, 2), [9] * 4])
    spans = layout.find_spans(kinds)
    assert (len(kinds), spans) == (53, [(7, 32), (39, 48)])
    golden = {5: (0, 5), 6: (0, 6), 7: (0, 32), 8: (1, 32), 14: (7, 32), 32: (7, 32), 33: (26, 33), 38: (31, 38)}
    golden |= {39: (32, 48), 45: (38, 48), 46: (39, 48), 48: (39, 48), 49: (42, 49)}
    assert {q: interval(q, 8, spans) for q in golden} == golden


def test_visible_sets_at_real_size_equal_golden_table():
    _, kinds = layout.assemble([[9] * 130, (18, 18), [9] * 40])
    spans = layout.find_spans(kinds)
    assert (len(kinds), spans) == (517, [(131, 476)])
    golden = {  # query: first and last raw key, visible entries of ratio 4 and of ratio 128
        130: (3, 130, 32, 1),
        131: (4, 476, 33, 1),
        132: (5, 476, 33, 1),
        258: (131, 476, 64, 2),
        300: (131, 476, 75, 2),
        476: (131, 476, 119, 3),
        477: (350, 477, 119, 3),
        516: (389, 516, 129, 4),
    }
    for query, row in golden.items():
        counts = [len(layout.entries_visible(query, ratio)) for ratio in (4, 128)]
        assert (*interval(query, 128, spans), *counts) == row


def test_dense_mask_of_small_span_has_golden_lengths():
    mask = layout.dense_mask([layout.raw_visible(q, 2, [(2, 5)]) for q in range(8)], 8)
    assert mask.sum(axis=1).tolist() == [1, 2, 5, 4, 4, 4, 2, 2]


def test_find_spans_with_adjacent_images_keeps_them_apart():
    _, kinds = layout.assemble([[9] * 6, (2, 2), (2, 3), [9] * 3])
    assert (len(kinds), layout.find_spans(kinds)) == (32, [(7, 16), (19, 28)])
    leading = [q for q in range(32) if kinds[q] == layout.PAD and not (7 <= q <= 16 or 19 <= q <= 28)]
    assert leading == [6, 17, 18]


def test_entries_visible_starts_at_last_token_of_group():
    for ratio in (4, 128):
        assert [len(layout.entries_visible(q, ratio)) for q in (0, ratio - 2, ratio - 1, 2 * ratio - 1)] == [0, 0, 1, 2]
    assert layout.raw_visible(0, 128, []) == {0}
    assert min(layout.raw_visible(127, 128, [])) == 0
    assert min(layout.raw_visible(128, 128, [])) == 1


# --- vision -----------------------------------------------------------------------------------------------------


def test_vision_rope_angles_are_row_block_then_column_block():
    angle = vision.rope_angles(3, 4, 64, 10000.0)[7]
    values = [math.cos(angle[0]), math.cos(angle[16]), math.sin(angle[0]), math.sin(angle[16])]
    assert values == pytest.approx([0.540302, -0.989992, 0.841471, 0.141120], abs=1e-6)


def test_unfold_pads_right_and_bottom_channel_major():
    x = (np.arange(20)[:, None] * 2 + np.arange(2)).astype(np.float64)
    tiles = vision.unfold(x, 4, 5, 3)
    assert tiles[0].tolist() == [0, 2, 4, 10, 12, 14, 20, 22, 24, 1, 3, 5, 11, 13, 15, 21, 23, 25]
    assert tiles[-1].tolist() == [36, 38, *[0] * 7, 37, 39, *[0] * 7]


def test_encode_image_sees_row_and_column_apart():
    weights = random_weights(IMAGE_CONFIG, seed=3)
    patches = np.random.default_rng(4).standard_normal((20, 12))
    rows = encode_image(IMAGE_CONFIG, weights, patches, 4, 5)
    assert rows.shape == (4, 64)
    assert np.abs(rows - encode_image(IMAGE_CONFIG, weights, patches, 5, 4)).max() > 1e-3
    assert to_emission_order(rows, 2, 2).tolist() == rows[[0, 2, 1, 3]].tolist()


def test_gelu_is_exact():
    assert vision.gelu(np.array([-1.0, 0.0, 2.0])) == pytest.approx([-0.158655253931457, 0, 1.954499736103642])


# --- laws of the text network -----------------------------------------------------------------------------------


def test_yarn_bounds_of_released_model_are_15_and_25():
    scaling = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    assert network.yarn_bounds(64, 160000, scaling) == (15, 25)
    config = {"qk_rope_head_dim": 64, "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": scaling}
    frequencies = network.rope_frequencies(config, ratio=128)
    plain = 160000.0 ** (-2 * np.arange(32) / 64)
    assert np.allclose(frequencies[:16], plain[:16], rtol=1e-14)
    assert np.allclose(frequencies[25:], plain[25:] / 16, rtol=1e-14)
    assert np.all(frequencies[16:25] < plain[16:25])


def test_sinkhorn_ends_on_columns():
    m = network.sinkhorn(np.random.default_rng(5).standard_normal((9, 4, 4)), 20, 1e-6)
    assert np.abs(m.sum(axis=1) - 1).max() < 1.01e-6
    assert np.abs(m - m.transpose(0, 2, 1)).max() > 0.1


def test_attend_with_one_key_shares_with_sink():
    q, key = np.full((1, 2, 4), 0.5), np.array([[1.0, 2.0, 3.0, 4.0]])
    out = network.attend(q, key, np.ones((1, 1), dtype=bool), np.array([2.5, -1e9]))
    assert out[0, 0] == pytest.approx(key[0] / 2)  # logit = 0.5 * 10 / 2 = the sink
    assert out[0, 1] == pytest.approx(key[0])


def test_compress_first_entry_pools_one_group_and_second_pools_two():
    config = {"rms_norm_eps": 0.0, "rope_scaling": TEXT_CONFIG["rope_scaling"]}
    config |= {"qk_rope_head_dim": 2, "rope_theta": 1e4, "compress_rope_theta": 16e4}
    rng = np.random.default_rng(6)
    weights = {"wkv.weight": rng.standard_normal((8, 3)), "wgate.weight": np.zeros((8, 3))}
    weights |= {"ape": np.zeros((4, 8)), "norm.weight": np.ones(4)}
    x = rng.standard_normal((11, 3))
    entries = network.compress(x, network.scope(weights, ""), 4, config, shift=0)
    kv = x @ weights["wkv.weight"].T
    means = np.stack([kv[:4, 4:].mean(axis=0), np.concatenate([kv[:4, :4], kv[4:8, 4:]]).mean(axis=0)])
    expected = network.rms_norm(means, 0.0)
    assert entries.shape == (2, 4)
    assert np.allclose(entries[:, :2], expected[:, :2])
    assert np.allclose(network.rotate(entries, np.array([0, -4]), network.rope_frequencies(config, 4)), expected)


def test_forward_with_shifted_positions_is_unchanged():
    weights = random_weights(TEXT_CONFIG, seed=7)
    ids = list(range(150))
    logits = [forward(TEXT_CONFIG, weights, ids, [-1] * 150, None, [], shift)["logits"] for shift in (0, 1280)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-9


def test_expert_gate_has_no_lower_clamp():
    one = np.ones((1, 1))
    weights = {"w1.weight": -20 * one, "w3.weight": -20 * one, "w2.weight": one}
    y = network.expert(one, network.scope(weights, ""), 0.3)
    assert y[0, 0] == pytest.approx(-20 / (1 + math.exp(20)) * -0.3)


def test_moe_bias_changes_selection_but_not_weights():
    config = TEXT_CONFIG | {"n_routed_experts": 3, "num_experts_per_tok": 2}
    eye = {f"experts.{e}.{w}.weight": np.eye(3) for e in range(3) for w in ("w1", "w2", "w3")}
    shared = {f"shared_experts.{w}.weight": np.zeros((3, 3)) for w in ("w1", "w2", "w3")}
    gate = {"gate.weight": np.eye(3), "gate.bias": np.array([0, 0, 9.0]), "gate.bias_vl": np.array([0, 9.0, 0])}
    table = {"gate.tid2eid": np.array([[1, 2]])}
    w = network.scope(eye | shared | gate | table, "")
    x = np.tile([3.0, 1.0, 0.0], (3, 1))
    kinds = [layout.TEXT, layout.PAD, layout.IMAGE]
    out, experts, margins = network.moe(x, w, False, [0] * 3, kinds, config)
    assert experts.tolist() == [[2, 0], [1, 0], [1, 0]]
    assert np.allclose(out, 1.5 * network.silu(x) * x)  # equal experts: the weights sum to 1.5
    assert np.all(margins > 0)
    _, hashed, hash_margins = network.moe(x, w, True, [0] * 3, kinds, config)
    assert hashed.tolist() == [[1, 2], [1, 0], [1, 0]]
    assert hash_margins[0] == math.inf


def test_best_with_ties_takes_lowest_index_and_reports_margin():
    assert network.best(np.array([1.0, 3.0, 1.0, 3.0, 0.0]), {0, 1, 2, 4}, 2) == ([1, 0], 0.0)
    assert network.best(np.zeros(4), {2, 3}, 2) == ([2, 3], math.inf)


# --- images in the text network ---------------------------------------------------------------------------------


def image_run(weights, scale_last_patch=1.0):
    ids, kinds = layout.assemble([[7, 8, 9, 10, 11], (2, 2), [12] * 20, (1, 2), [13] * 6])
    rng = np.random.default_rng(8)
    images = [(rng.standard_normal((20, 12)), 4, 5), (rng.standard_normal((8, 12)), 2, 4)]
    images[0][0][-1] *= scale_last_patch
    return kinds, run(IMAGE_CONFIG, weights, ids, kinds, images)


def test_run_with_changed_image_changes_span_and_later_rows_only():
    weights = random_weights(IMAGE_CONFIG, seed=9)
    kinds, first = image_run(weights)
    _, second = image_run(weights, scale_last_patch=-1.0)
    assert first["spans"] == [(7, 16), (39, 48)]
    moved = np.abs(first["logits"] - second["logits"]).max(axis=1)
    assert moved[:7].max() < 1e-12  # text and leading PADs before the span
    assert moved[7:17].min() > 1e-6  # START already sees the whole image
    assert np.all(np.isfinite(first["logits"]))
    assert [len(s) for s in first["selected"][1]] == [min(4, (t + 1) // 4) for t in range(len(kinds))]


def test_run_puts_features_in_emission_order():
    weights = random_weights(IMAGE_CONFIG, seed=10)
    kinds, result = image_run(weights)
    image_rows = result["embeddings"][np.array(kinds) == layout.IMAGE]
    patches = np.random.default_rng(8).standard_normal((20, 12))
    raster = encode_image(IMAGE_CONFIG, weights, patches, 4, 5)
    assert np.array_equal(image_rows[:4], raster[[0, 2, 1, 3]])
    assert np.array_equal(result["embeddings"][7], weights["image_start"])
    assert np.array_equal(result["embeddings"][5], weights["image_pad"])
