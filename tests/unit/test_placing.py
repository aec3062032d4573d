"""Files of two releases in one folder: refused with the tensors that do not fit, and what has probably happened."""

import json

import pytest
import torch
from quantised_helpers import write_edited
from safetensors.torch import load_file, save_file

from deepspan.errors import WeightsError
from deepspan.weights.load import load_model
from deepspan.weights.placing import likely_cause
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.tiny import write_tiny

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("placing")
    return {
        "vision": write_tiny(root / "vision", ratios=(0, 4)),
        "text": write_tiny(root / "text", ratios=(0, 4), vision=False),
        "fp8": write_quantised(
            write_tiny(root / "plain", ratios=(0, 4), draft_stages=1), root / "fp8", RECIPES["fp8-fp4"]
        ),
    }


def _refused(folder, *parts):
    with pytest.raises(WeightsError) as caught:
        load_model(folder, dtype=torch.float32)
    assert [part for part in parts if part not in str(caught.value)] == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("files", "config", "parts"),
    [
        (
            "vision",
            "text",
            ["files hold vision tensors and config.json describes a text model", "unexpected: aligner."],
        ),
        ("text", "vision", ["files hold no vision tensors and config.json describes a vision", "missing: aligner."]),
    ],
)
def test_loading_with_the_configuration_of_another_release_says_so(written, tmp_path, files, config, parts):
    (tmp_path / FILE).write_bytes((written[files] / FILE).read_bytes())
    (tmp_path / "config.json").write_bytes((written[config] / "config.json").read_bytes())
    _refused(tmp_path, *parts, "two releases")


def test_likely_cause_is_not_guessed_of_single_tensors():
    assert likely_cause(["layers.0.ffn.gate.bias"], []) == ""
    assert likely_cause(["layers.0.ffn.gate.bias_vl", "norm.weight"], []) == ""
    assert likely_cause(["vision.norm.weight"], ["vision.norms.weight"]) == ""


def test_loading_an_unexpected_tensor_names_its_file(written, tmp_path):
    def add(tensors):
        tensors["extra"] = torch.zeros(1)

    tensors = load_file(written["text"] / FILE)
    add(tensors)
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_bytes((written["text"] / "config.json").read_bytes())
    _refused(tmp_path, f"unexpected: extra ({FILE})")


def test_loading_released_among_transformers_names_says_so(tmp_path):
    folder = write_tiny(tmp_path, ratios=(0,), vision=False, transformers_names=True)
    tensors = load_file(folder / FILE)
    tensors["norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / FILE)
    _refused(folder, "unexpected tensor norm.weight", "released name of model.norm.weight", "two conversions")


def test_loading_block_scales_of_two_releases_is_refused_by_both(written, tmp_path):
    """Flash and Flash-Base have the same names and shapes; their shards differ in the dtype of scales."""
    name, other = "layers.1.attn.wq_b.scale", "layers.0.attn.wq_a.scale"

    def widen(tensors):
        tensors[name] = tensors[name].float()

    message = _refused(write_edited(written["fp8"], tmp_path, widen), "block scales are of two kinds")
    assert f"{other} is F8_E8M0 (model-00001-of-00001.safetensors)" in message
    assert f"{name} is F32 (model-00001-of-00001.safetensors)" in message


def test_loading_draft_stages_with_scales_of_their_own_kind_is_accepted(written, tmp_path):
    def widen(tensors):
        for name in tensors:
            if name.startswith("mtp.") and name.endswith(".scale") and ".experts." not in name:
                tensors[name] = tensors[name].float()

    assert load_model(write_edited(written["fp8"], tmp_path, widen), dtype=torch.float32).drafter is None


@pytest.mark.parametrize("kind", ["missing", "truncated", "pointer"])
def test_loading_a_partial_download_is_refused_before_anything_is_built(tmp_path, kind):
    folder = write_tiny(tmp_path, ratios=(0,), num_shards=3)
    last = folder / "model-00003-of-00003.safetensors"
    if kind == "missing":
        last.unlink()
    elif kind == "truncated":
        last.write_bytes(last.read_bytes()[:-100])
    else:
        last.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    seen = []
    with pytest.raises(WeightsError, match=last.name):
        load_model(folder, dtype=torch.float32, progress=lambda *counts: seen.append(counts))
    assert seen == []


def test_loading_with_configuration_of_more_layers_names_what_is_missing(written, tmp_path):
    raw = json.loads((written["text"] / "config.json").read_text())
    (tmp_path / FILE).write_bytes((written["text"] / FILE).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 0]}))
    _refused(tmp_path, "missing: layers.2.attn.attn_sink, ", "and 37 more")
