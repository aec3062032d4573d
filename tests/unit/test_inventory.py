"""What a configuration lets expect, and counts by part: the published numbers of the releases."""

import json
from collections import Counter
from pathlib import Path

import pytest
from quantised_helpers import stored_tensors
from released import flash, flash_dspark, flash_vision

from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError
from deepspan.weights.folder import Headers
from deepspan.weights.inventory import (
    PARTS,
    active_parameters,
    count_parts,
    expected_headers,
    expected_table,
    part_of,
    stored_or_expected,
)
from deepspan.weights.load import fit_headers
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.tiny import tiny_config, write_tiny

SOURCE = Path("config.json")


def _counted(raw):
    config = parse_model_config(raw)
    stored = expected_headers(config, SOURCE)
    return config, stored, count_parts(stored.tensors, {key: (key,) for key in stored}, expected_table(config))


@pytest.fixture(scope="module")
def text():
    return _counted(flash())


@pytest.fixture(scope="module")
def vision():
    return _counted(flash_vision())


def _sums(parts):
    return sum(part.num_tensors for part in parts.values()), sum(part.num_bytes for part in parts.values())


def test_expected_text_release_has_published_tensors_and_bytes(text):
    _, stored, parts = text
    assert (len(stored.tensors), _sums(parts)) == (69_187, (69_187, 159_609_485_896))
    dtypes = Counter(tensor.dtype for tensor in stored.tensors.values())
    assert dtypes == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I8": 33_792, "I64": 3}


def test_expected_text_release_has_published_parameters(text):
    config, _, parts = text
    drafts = sum(parts[part].num_parameters for part in ("draft stages", "draft experts"))
    total = sum(part.num_parameters for part in parts.values())
    assert (total, drafts) == (290_942_289_362, 6_610_048_891)
    assert parts["routed experts"].num_parameters == 277_025_390_592
    assert parts["embedding"].num_parameters == parts["head"].num_parameters == 529_530_880
    assert active_parameters(parts, config) == 13_799_632_471


def test_parts_of_attention_have_published_parameters(text):
    """By layer: 106,956,352 without compression, 126,098,624 with ratio 4, 111,216,704 with ratio 128."""
    _, _, parts = text
    found = {part: parts[part].num_parameters for part in ("attention", "compressors", "indexer")}
    assert found["compressors"] == 21 * 8_393_216 + 20 * 4_260_352
    assert found["indexer"] == 21 * 10_749_056
    assert sum(found.values()) == 2 * 106_956_352 + 21 * 126_098_624 + 20 * 111_216_704


def test_expected_vision_release_has_published_tensors_and_bytes(vision, text):
    _, stored, parts = vision
    assert sum(part.num_bytes for part in parts.values()) == 167_811_372_792
    sizes = {part: parts[part].num_bytes for part in ("vision tower", "aligner", "image vectors")}
    assert sizes == {"vision tower": 823_685_120, "aligner": 109_068_288, "image vectors": 32_768}
    counts = [parts[part].num_tensors for part in ("vision tower", "aligner", "image vectors")]
    assert counts == [259, 4, 4]
    bias_vl = [tensor.num_bytes for name, tensor in stored.tensors.items() if name.endswith("bias_vl")]
    assert (len(bias_vl), sum(bias_vl)) == (46, 47_104)


def test_expected_vision_release_adds_published_extra_to_the_text_release(vision):
    base = _sums(_counted(flash_dspark())[2])
    extended = _sums(vision[2])
    assert (extended[0] - base[0], extended[1] - base[1]) == (316, 932_836_352)


def test_parts_cover_every_tensor_of_the_releases_and_nothing_else(vision, text):
    for _, stored, parts in (vision, text):
        assert "unknown" not in parts
        assert list(parts) == [part for part in PARTS if part in parts]
        assert {part_of(name) for name in stored} == set(parts)
    for name in ("layers.0.attn", "layers.x.attn.wq_a.weight", "embed", "model.embed.weight", "hc_attn_fn", "norms.w"):
        assert part_of(name) == "unknown", name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.2.attn.q_norm.weight", "attention"),
        ("layers.2.attn_norm.weight", "norms"),
        ("layers.2.attn.indexer.compressor.ape", "indexer"),
        ("layers.2.ffn.gate.tid2eid", "routers"),
        ("layers.2.hc_ffn_scale", "hyper-connections"),
        ("mtp.0.ffn.experts.3.w1.scale", "draft experts"),
        ("mtp.2.markov_head.markov_w1.weight", "draft stages"),
        ("image_pad", "image vectors"),
    ],
)
def test_part_of_a_name(name, part):
    assert part_of(name) == part


# --- what is expected is what is written


@pytest.mark.parametrize("recipe", [None, "fp8-fp4", "fp8"])
@pytest.mark.parametrize("stages", [0, 2])
def test_expected_headers_are_those_of_written_checkpoints(tmp_path, recipe, stages):
    folder = write_tiny(tmp_path / "plain", draft_stages=stages)
    if recipe:
        folder = write_quantised(folder, tmp_path / "packed", RECIPES[recipe])
    config, found = stored_or_expected(folder)
    assert isinstance(found, Headers)
    _, expected = stored_or_expected(folder / "config.json")

    def facts(stored):
        return {name: (tensor.shape, tensor.dtype) for name, tensor in stored.tensors.items()}

    assert facts(expected) == facts(found)
    assert sum(t.num_bytes for t in expected.tensors.values()) == sum(t.nbytes for t in stored_tensors(folder).values())
    assert fit_headers(expected, config).forms.formats == fit_headers(found, config).forms.formats


def test_expected_headers_of_an_export_are_refused():
    raw = flash() | {"quantization_config": {"quant_method": "ascend"}}
    with pytest.raises(ConfigError, match=r"quant_method ascend: .* quant_model_description\.json"):
        expected_headers(parse_model_config(raw), SOURCE)


def test_expected_headers_of_experts_that_fp4_cannot_hold_are_refused():
    raw = tiny_config(vocab_size=300, overrides={"moe_intermediate_size": 40, "expert_dtype": "fp4"})
    with pytest.raises(ConfigError, match=r"multiple of 32 columns, layers\.0\.ffn\.experts\.0\.w2\.weight has 40"):
        expected_headers(parse_model_config(raw), SOURCE)


def test_stored_or_expected_of_a_folder_with_configuration_alone_expects(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(flash()))
    _, stored = stored_or_expected(tmp_path)
    assert len(stored.tensors) == 69_187
