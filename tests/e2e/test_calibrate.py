"""Calibration: which inputs were seen, by the layers asked for and no others; what examples must look like."""

import json
import math
import shutil

import numpy as np
import pytest
from PIL import Image
from quantised_helpers import stored_tensors
from safetensors.torch import save_file

from deepspan import LLM
from deepspan.calibrate import NEW_TOKENS, digest_of_examples, input_ranges, read_examples
from deepspan.config.engine import EngineConfig
from deepspan.errors import InputError, WeightsError
from deepspan.weights.plan import FORMATS
from deepspan.weights.recode import static_modules
from deepspan.weights.source import Source
from deepspan.weights.tiny import write_tiny

LIMITS = {"max_model_len": 600, "max_num_seqs": 4, "max_batched_tokens": 400}


@pytest.fixture
def examples(tmp_path):
    """Writes a file of examples; a picture lies beside it."""
    pixels = np.random.default_rng(0).integers(0, 256, (18, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.png")

    def write(*lines):
        file = tmp_path / "examples.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return file

    return write


TEXT, PICTURE = {"text": "what is the name of this?"}, {"text": "what is this?", "images": ["cat.png"]}
LONG = {"text": "what is the name of this? " * 8}  # so long that the indexer has to choose


@pytest.fixture(scope="module")
def llm(model_folder):
    """What is found in the prefix cache would not be seen again."""
    return LLM(model_folder, device="cpu", engine=EngineConfig(prefix_caching=False, **LIMITS))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A model with draft stages, and the layers of it that could be static."""
    folder = write_tiny(tmp_path_factory.mktemp("drafting"), ratios=(0, 4), draft_stages=2, vision=False)
    return LLM(
        folder, device="cpu", engine=EngineConfig(draft_method="dspark", prefix_caching=False, **LIMITS)
    ), Source(folder)


def test_ranges_are_those_of_what_layers_were_given(llm, model_folder, examples):
    """Measured behind the layer that feeds them, over the same answers."""
    outputs = []
    norm = llm.modules["layers.1.attn_norm"]
    hook = norm.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    names = ["layers.1.attn.wq_a", "layers.1.attn.wkv"]
    found = input_ranges(llm, read_examples(examples(TEXT, PICTURE)), names)
    hook.remove()
    assert set(found) == set(names)
    for seen in found.values():
        assert seen.low == min(float(output.min()) for output in outputs) < 0
        assert seen.high == max(float(output.max()) for output in outputs) > 0
    assert sum(output.shape[0] == 2 for output in outputs) > 0  # both decode together


def test_ranges_of_more_examples_hold_those_of_fewer(llm, model_folder, examples):
    modules = static_modules(Source(model_folder), FORMATS["w8a8"])
    fewer = input_ranges(llm, read_examples(examples(TEXT)), modules)
    more = input_ranges(llm, read_examples(examples(TEXT, PICTURE)), modules)
    assert set(fewer) == set(more) == {name for name in modules if "indexer" not in name}
    modules = list(fewer)
    assert all(more[name].low <= fewer[name].low + 1e-5 for name in modules)
    assert all(more[name].high >= fewer[name].high - 1e-5 for name in modules)
    assert any(more[name].high > 1.01 * fewer[name].high for name in modules)


def test_layers_of_draft_stages_are_seen_too(drafting, examples):
    llm, source = drafting
    modules = static_modules(source, FORMATS["w8a8"])
    found = input_ranges(llm, read_examples(examples(LONG)), modules)
    assert set(found) == set(modules)
    assert sum(name.startswith("mtp.") for name in found) == 2 * 6


def test_layer_whose_partner_saw_nothing_has_no_range(drafting, examples):
    llm, _ = drafting
    names = ["layers.0.attn.wq_a", "layers.0.ffn.shared_experts.w3", "layers.0.ffn.shared_experts.w2"]
    assert set(input_ranges(llm, read_examples(examples(TEXT)), names)) == {"layers.0.ffn.shared_experts.w2"}


def test_nothing_watches_afterwards(llm, model_folder, examples):
    modules = static_modules(Source(model_folder), FORMATS["w8a8"])
    steps = []
    input_ranges(llm, read_examples(examples(*[TEXT] * 9)), modules, lambda *step: steps.append(step))
    assert steps == [(8, 9), (9, 9)]
    (examples(TEXT).parent / "broken.png").write_bytes(b"no picture")
    broken = read_examples(examples(TEXT, {"text": "x", "images": ["broken.png"]}))
    with pytest.raises(InputError, match=r"examples.jsonl, line 2: .*not JPEG, PNG"):
        input_ranges(llm, broken, modules)
    assert not any(module._forward_pre_hooks for module in llm.modules.values())


def test_answers_are_long_enough_to_see_decoding(llm, examples):
    rows = []
    hook = llm.modules["layers.0.attn.wq_a"].register_forward_hook(lambda module, arguments, _: rows.append(arguments))
    input_ranges(llm, read_examples(examples(TEXT)), ["layers.0.attn.wq_b"])
    hook.remove()
    assert 2 <= len(rows) <= NEW_TOKENS + 1
    assert rows[-1][0].shape[0] == 1


def test_inputs_that_are_not_finite_are_refused_by_layer(tmp_path, examples):
    """In a draft stage, since a request with such numbers in the network fails by itself."""
    folder = write_tiny(tmp_path / "model", ratios=(0,), draft_stages=1, vision=False)
    tensors = stored_tensors(folder)
    tensors["mtp.0.attn.q_norm.weight"][:] = math.inf
    save_file(tensors, folder / "model.safetensors")
    llm = LLM(folder, device="cpu", engine=EngineConfig(draft_method="dspark", **LIMITS))
    with pytest.raises(WeightsError, match=r"inputs of mtp\.0\.attn\.wq_b reach from .*; expected finite numbers"):
        input_ranges(llm, read_examples(examples(TEXT)), ["mtp.0.attn.wq_b"])


def test_example_that_the_model_fails_at_is_named(tmp_path, examples):
    folder = write_tiny(tmp_path / "model", ratios=(0,), vision=False)
    tensors = stored_tensors(folder)
    tensors["layers.0.attn.q_norm.weight"][:] = math.inf
    save_file(tensors, folder / "model.safetensors")
    llm = LLM(folder, device="cpu", engine=EngineConfig(**LIMITS))
    with pytest.raises(InputError, match=r"examples\.jsonl, line 1: .*not numbers"):
        input_ranges(llm, read_examples(examples(TEXT)), ["layers.0.attn.wq_b"])


# --- files


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected"),
        ({}, "line 2: expected"),
        ({"text": 1}, "line 2: expected"),
        ({"text": "x", "image": "cat.png"}, "line 2: expected"),
        ({"text": "x", "images": "cat.png"}, "images must be a list of files, found 'cat.png'"),
        ({"text": "x", "images": [1]}, "images must be a list"),
        ({"text": "x", "images": ["dog.png"]}, "line 2: no picture at "),
    ],
)
def test_line_that_is_no_example_is_refused_by_number(examples, line, part):
    with pytest.raises(InputError) as caught:
        read_examples(examples(TEXT, line))
    assert part in str(caught.value)
    assert "examples.jsonl" in str(caught.value)


def test_file_without_examples_is_refused(examples, tmp_path):
    with pytest.raises(InputError, match="holds no example"):
        read_examples(examples("", "  "))
    with pytest.raises(InputError, match="nowhere cannot be read: No such file"):
        read_examples(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="bytes cannot be read"):
        read_examples(tmp_path / "bytes")


def test_digest_changes_with_texts_and_pictures_only(examples, tmp_path):
    file = examples(TEXT, PICTURE)
    first = digest_of_examples(read_examples(file))
    assert digest_of_examples(read_examples(shutil.copyfile(file, tmp_path / "other.jsonl"))) == first
    texts = digest_of_examples(read_examples(examples(PICTURE, TEXT)))
    Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    picture = digest_of_examples(read_examples(examples(TEXT, PICTURE)))
    assert len({first, texts, picture}) == 3


def test_ranges_are_the_same_again(llm, model_folder, examples):
    modules = static_modules(Source(model_folder), FORMATS["w8a8"])
    first, second = (input_ranges(llm, read_examples(examples(LONG, PICTURE)), modules) for _ in range(2))
    assert set(first) == set(modules)
    assert first == second
