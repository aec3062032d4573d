"""Quantised checkpoints answer as the same weights decoded ahead of time; int8 ones as close as int8 can be."""

import numpy as np
import pytest
import torch
from network_helpers import SMALL, SMALL_IMAGES, batch_of, encode, last_streams, logits_of, make_prompt, relative_error
from quantised_helpers import decoded_tensors, write_plain

from deepspan.model.packed_linear import PackedLinear
from deepspan.ops import packed
from deepspan.ops.formats import Format
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.tiny import write_tiny

RATIOS = (0, 4, 128, 4)
# Every text row of every layer goes where its table says, and the indexer has room for all: rounding cannot change a
# choice, so that closeness can be measured.
FORCED = {"num_hash_layers": len(RATIOS), "index_topk": 64}
WIDE = {"hidden_size": 192, "moe_intermediate_size": 160}  # more than one block of 128, and partial ones


@pytest.fixture(scope="module")
def folders(tiny_models, tmp_path_factory):
    """`folders(recipe)` -> (plain model, folder of its weights in the recipe's formats)."""
    root = tmp_path_factory.mktemp("quantised")
    model = tiny_models(ratios=RATIOS, **FORCED, **WIDE)
    made = {name: write_quantised(model.folder, root / name, recipe) for name, recipe in RECIPES.items()}
    return lambda recipe: (model, made[recipe])


@pytest.fixture(scope="module")
def prompts(tiny_models):
    vocab = tiny_models(ratios=RATIOS, **FORCED, **WIDE).config.vocab_size
    return {
        "text": [make_prompt([150], vocab, 1), make_prompt([37], vocab, 2)],
        "images": [make_prompt([20, (5, 7), 30, (3, 3), 9], vocab, 3)],
    }


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("recipe", ["fp8-fp4", "fp8"])
def test_block_formats_give_the_logits_of_weights_decoded_ahead(folders, prompts, tmp_path, recipe, kind):
    model, folder = folders(recipe)
    plain = write_plain(folder, tmp_path / "plain", decoded_tensors(folder))
    expected = load_model(plain, dtype=torch.float32).network
    network = load_model(folder, dtype=torch.float32).network
    batch = batch_of(model, prompts[kind])
    assert relative_error(logits_of(network, batch), logits_of(expected, batch)) < 1e-5
    assert relative_error(last_streams(network, batch), last_streams(expected, batch)) < 1e-5
    # The comparison means something: the formats do change the answer.
    assert relative_error(logits_of(network, batch), logits_of(model.network, batch)) > 0.01


def test_block_formats_in_small_tiles_give_the_same_logits(folders, prompts, monkeypatch):
    model, folder = folders("fp8-fp4")
    network = load_model(folder, dtype=torch.float32).network
    batch = batch_of(model, prompts["text"])
    whole = logits_of(network, batch)
    monkeypatch.setattr(packed, "MAX_DECODED", 500)
    assert relative_error(logits_of(network, batch), whole) < 1e-5


def test_block_formats_in_bf16_give_the_logits_of_weights_decoded_ahead(folders, prompts, tmp_path):
    """Power-of-two scales decode to bf16 without a rounding, so only the order of sums can differ."""
    model, folder = folders("fp8-fp4")
    tensors = decoded_tensors(folder)
    narrow = {n: t.bfloat16() if t.dtype == torch.float32 and "hc_" not in n else t for n, t in tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith((".w1.weight", ".w2.weight", ".wq_a.weight", ".wo_a.weight")) and "vision" not in name:
            assert torch.equal(narrow[name].float(), tensor.float()), name
    expected = load_model(write_plain(folder, tmp_path / "plain", narrow), dtype=torch.bfloat16).network
    network = load_model(folder, dtype=torch.bfloat16).network
    batch = batch_of(model, prompts["text"])
    assert relative_error(logits_of(network, batch), logits_of(expected, batch)) < 0.05


def test_vision_network_of_a_quantised_checkpoint_is_the_plain_one(folders, prompts):
    model, folder = folders("fp8-fp4")
    network = load_model(folder, dtype=torch.float32).network
    (prompt,) = prompts["images"]
    with torch.no_grad():
        found, expected = encode(network, prompt), encode(model.network, prompt)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("recipe", "error", "agreement"),
    [("fp8-fp4", 0.3, 0.6), ("fp8", 0.12, 0.8), ("w8a8", 0.05, 0.9), ("w4a8", 0.3, 0.6)],
)
def test_quantised_checkpoint_answers_close_to_the_plain_one(folders, prompts, recipe, error, agreement):
    """Random weights show the bare error of a format; the release was trained to live with its own."""
    model, folder = folders(recipe)
    network = load_model(folder, dtype=torch.float32).network
    batch = batch_of(model, prompts["text"])
    found, expected = logits_of(network, batch), logits_of(model.network, batch)
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    same = float((found.argmax(-1) == expected.argmax(-1)).mean())
    assert 1e-4 < distance < error
    assert same >= agreement


@pytest.mark.parametrize(
    ("recipe", "dense", "experts"),
    [("fp8-fp4", Format.FP8, Format.FP4), ("fp8", Format.FP8, Format.FP8), ("w8a8", Format.INT8, Format.INT8),
     ("w4a8", Format.INT8, Format.INT4)],
)  # fmt: skip
def test_quantised_checkpoint_keeps_each_layer_in_its_format(folders, recipe, dense, experts):
    _, folder = folders(recipe)
    network = load_model(folder, dtype=torch.float32).network
    formats = {n: m.format for n, m in network.named_modules() if isinstance(m, PackedLinear)}
    assert {f for n, f in formats.items() if ".experts." in n} == {experts}
    assert {f for n, f in formats.items() if ".experts." not in n} == {dense}
    assert sum(".experts." in n for n in formats) == 3 * 8 * len(RATIOS)
    released = {"attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b"}
    kept = {n.removeprefix("layers.1.") for n in formats if n.startswith("layers.1.attn")}
    assert kept == (released if dense is Format.FP8 else released - {"attn.wo_a", "attn.wo_b"})


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_quantised_checkpoint_accounts_for_draft_stages(tmp_path, recipe):
    source = write_tiny(tmp_path / "plain", ratios=(0,), draft_stages=2, overrides=SMALL | SMALL_IMAGES)
    left_out = load_model(write_quantised(source, tmp_path / "out", RECIPES[recipe]), dtype=torch.float32).left_out
    drafts = {name for name in left_out if name.startswith("mtp.")}
    assert {f"mtp.{stage}.attn.wq_a.weight" for stage in (0, 1)} < drafts
    scale = "scale" if RECIPES[recipe].dense is Format.FP8 else "weight_scale"
    assert {f"mtp.{stage}.ffn.experts.7.w2.{scale}" for stage in (0, 1)} < drafts
    assert {left_out[name] for name in drafts} == {left_out["mtp.0.attn.wq_a.weight"]}
