"""The network against transformers' own DeepSeek-V4 on text, weights carried over by the project's name table.

The checkpoint is written once under the original names and once under transformers' names. The second one is loaded
into transformers' model as it is (strictly: no key missing, none left over), the first one into the network, so that
every rule of the table is checked by values and not only by shape.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from network_helpers import Prompt, batch_of, logits_of, open_model
from oracle.tiny import TEXT_CONFIG
from safetensors.torch import load_file

from deepspan.weights.load import load_model
from deepspan.weights.tiny import write_tiny

TOLERANCE = 2e-5
SEEDS = (1, 2)
NUM_TOKENS = 300
VARIANTS = {
    "released_pattern": {},
    "clamped_other_ratios": {"swiglu_limit": 0.3, "compress_ratios": [4, 128, 0, 4], "num_hash_layers": 2},
}


@pytest.fixture(scope="module", params=VARIANTS)
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """The same checkpoint under original and under transformers' names."""
    fields = TEXT_CONFIG | VARIANTS[request.param]
    pair = []
    for transformers_names in (False, True):
        folder = tmp_path_factory.mktemp("named")
        pair.append(write_tiny(folder, vision=False, seed=1, transformers_names=transformers_names, overrides=fields))
    return pair[0], pair[1]


def transformers_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """fp32 logits [batch, tokens, V] of one call without a cache."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in raw.items() if name not in ("architectures", "model_type", "torch_dtype")}
    fields["rope_scaling"] = fields["rope_scaling"] | {"rope_type": "yarn"}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        config = DeepseekV4Config(**fields, attn_implementation="eager", experts_implementation="eager")
        model = DeepseekV4ForCausalLM(config).float().eval()
        stored = load_file(folder / "model.safetensors")
        model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in stored.items()}, strict=True)
        return model(torch.from_numpy(ids), use_cache=False).logits.numpy()


def random_ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TEXT_CONFIG["vocab_size"], NUM_TOKENS)


def test_logits_of_batch_equal_transformers(folders):
    original, renamed = folders
    model = open_model(original)
    ids = np.stack([random_ids(seed) for seed in SEEDS])
    text = np.full(NUM_TOKENS, -1, dtype=np.int8)
    prompts = [Prompt(ids=row, kinds=text, spans=(), images=()) for row in ids]
    found = logits_of(model.network, batch_of(model, prompts))
    expected = transformers_logits(renamed, ids).reshape(found.shape)
    assert expected.std() > 0.5
    assert np.abs(found - expected).max() < TOLERANCE


def test_checkpoint_with_transformers_names_loads_to_the_same_parameters(folders):
    states = [load_model(folder, dtype=torch.float32).network.state_dict() for folder in folders]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.dtype == states[1][name].dtype
        assert torch.equal(value, states[1][name]), name


def test_vision_checkpoint_with_transformers_names_loads_to_the_same_parameters(tmp_path):
    """Vision tensors keep their names; `bias_vl` moves with its gate."""
    states = [
        load_model(
            write_tiny(tmp_path / str(renamed), seed=3, transformers_names=renamed), dtype=torch.float32
        ).network.state_dict()
        for renamed in (False, True)
    ]
    assert any(name.endswith("bias_vl") for name in states[0])
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
