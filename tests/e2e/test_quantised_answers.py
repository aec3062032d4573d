"""Quantised checkpoints through the whole engine: the trained model still answers right, and drafts change nothing."""

import pytest
import torch
from quantised_helpers import decoded_tensors, write_plain
from typer.testing import CliRunner

from deepspan import LLM, SamplingParams
from deepspan.bundled import bundled_model
from deepspan.cli.main import app
from deepspan.config.engine import EngineConfig
from deepspan.evaluate import evaluate
from deepspan.model.packed_linear import PackedLinear
from deepspan.ops.formats import Format
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = ["what is the name of", "a b c d e f g a b c d"]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_trained_model_answers_right_in_every_format(tmp_path, recipe):
    """Of 10 questions each; the plain model has all of these right."""
    llm = LLM(write_quantised(bundled_model(), tmp_path, RECIPES[recipe]), device="cpu")
    found = {score.skill: score.num_right for score in evaluate(llm, 10, skills=("colour", "shape", "repeat"))}
    assert min(found.values()) >= 9, found


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """Folders of one model with draft stages, by recipe."""
    root = tmp_path_factory.mktemp("drafting")
    source = write_tiny(root / "plain", ratios=(0, 4), draft_stages=2)
    return {name: write_quantised(source, root / name, recipe) for name, recipe in RECIPES.items()}


def _answers(folder, **engine):
    limits = {"max_model_len": 200, "max_num_seqs": 2, "max_batched_tokens": 400}
    llm = LLM(folder, device="cpu", engine=EngineConfig(**limits, **engine), cache_bytes=1 << 26)
    return [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("recipe", ["fp8-fp4", "w8a8"])
def test_drafts_of_a_quantised_checkpoint_change_no_answer(drafting, recipe, kv_dtype):
    plain = _answers(drafting[recipe], kv_dtype=kv_dtype)
    assert _answers(drafting[recipe], draft_method="dspark", kv_dtype=kv_dtype) == plain
    assert len({tuple(answer) for answer in plain}) == len(PROMPTS)


def test_block_formats_answer_as_weights_decoded_ahead(drafting, tmp_path):
    folder = drafting["fp8-fp4"]
    plain = write_plain(folder, tmp_path / "plain", decoded_tensors(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((folder / name).read_bytes())
    assert _answers(folder) == _answers(plain)


@pytest.mark.parametrize(("recipe", "dense"), [("fp8-fp4", Format.FP8), ("w8a8", Format.INT8)])
def test_draft_stages_stay_packed_too(drafting, recipe, dense):
    loaded = load_model(drafting[recipe], dtype=torch.float32, drafts=DraftKind.DSPARK)
    assert loaded.drafter is not None
    formats = {n: m.format for n, m in loaded.drafter.named_modules() if isinstance(m, PackedLinear)}
    assert formats["mtp.1.attn.wq_b"] is dense
    assert sum(".experts." in name for name in formats) == 2 * 3 * 8
    assert ("mtp.0.main_proj" in formats) == (dense is Format.FP8)
    assert not any(value.is_meta for value in loaded.drafter.state_dict().values())


# --- from the command line


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_tiny_command_writes_a_checkpoint_in_the_format_asked_for(tmp_path, recipe):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["tiny", str(out), "--layers", "2", "--shards", "2", "--weights", recipe])
    assert result.exit_code == 0, result.output
    network = load_model(out, dtype=torch.float32).network
    assert network.get_submodule("layers.1.ffn.experts.0.w1").format is RECIPES[recipe].experts
    again = CliRunner().invoke(app, ["tiny", str(out), "--layers", "2"])
    assert again.exit_code == 0, again.output
    plain = load_model(out, dtype=torch.float32).network  # nothing of the other format is left behind
    assert plain.get_submodule("layers.1.ffn.experts.0.w1").format is None


def test_tiny_command_with_an_unknown_format_writes_nothing(tmp_path):
    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "out"), "--weights", "int3"])
    assert result.exit_code != 0
    assert "int3" in str(result.exception)
    assert not (tmp_path / "out").exists()
