"""Tiny checkpoints: same arguments, same bytes; variants keep what they share; nothing is written that cannot load."""

import pytest
import torch
from safetensors.torch import load_file

from deepspan.config.model import load_model_config
from deepspan.errors import ConfigError
from deepspan.text.tokenizer import Tokenizer
from deepspan.weights.checkpoint import Checkpoint
from deepspan.weights.load import load_model
from deepspan.weights.tiny import write_tiny


def _files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("arguments", [{}, {"vision": False, "num_shards": 3}, {"draft_stages": 2, "seed": 5}])
def test_tiny_checkpoint_written_twice_is_the_same_bytes(tmp_path, arguments):
    first, second = (write_tiny(tmp_path / name, **arguments) for name in "ab")
    assert _files(first) == _files(second)


def test_tiny_checkpoint_of_another_seed_differs_in_every_random_tensor(tmp_path):
    first, second = (_tensors(write_tiny(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    assert first.keys() == second.keys()
    assert [name for name in first if torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "variant",
    [
        {"vision": False},
        {"draft_stages": 2},
        {"ratios": (0, 4, 128, 4, 0, 128)},
        {"ratios": (0, 4)},
        {"overrides": {"num_hash_layers": 0}},
        {"overrides": {"moe_intermediate_size": 48}},
    ],
    ids=str,
)
def test_tiny_checkpoint_of_a_variant_keeps_what_it_shares(tmp_path, variant):
    base, other = _tensors(write_tiny(tmp_path / "base")), _tensors(write_tiny(tmp_path / "other", **variant))
    shared = [name for name in base.keys() & other.keys() if base[name].shape == other[name].shape]
    assert len(shared) > 40
    assert [name for name in shared if not torch.equal(base[name], other[name])] == []


def test_tiny_checkpoint_holds_the_dtypes_of_an_unquantised_release(tmp_path):
    checkpoint = Checkpoint(write_tiny(tmp_path))
    dtypes = {name: stored.dtype for name, stored in checkpoint.tensors.items()}
    assert set(dtypes.values()) == {"BF16", "F32", "I64"}
    assert dtypes["layers.0.ffn.gate.tid2eid"] == "I64"
    assert dtypes["layers.1.hc_attn_fn"] == dtypes["layers.1.ffn.gate.bias_vl"] == "F32"
    assert dtypes["layers.1.ffn.experts.3.w2.weight"] == dtypes["vision.norm.weight"] == "BF16"


@pytest.mark.parametrize(("num_experts", "num_active"), [(4, 2), (3, 3), (24, 6)])
def test_tiny_hash_table_holds_distinct_experts_of_the_model(tmp_path, num_experts, num_active):
    sizes = {"n_routed_experts": num_experts, "num_experts_per_tok": num_active}
    table = _tensors(write_tiny(tmp_path, ratios=(0,), overrides=sizes))["layers.0.ffn.gate.tid2eid"]
    assert sorted(set(table.flatten().tolist())) == list(range(num_experts))
    assert all(len(set(row)) == num_active for row in table.tolist())


def test_tiny_checkpoint_has_a_tokenizer_that_fits(tmp_path):
    folder = write_tiny(tmp_path)
    assert Tokenizer(folder, vision=True).vocab_size == load_model_config(folder).vocab_size


def test_tiny_checkpoint_written_over_a_sharded_one_leaves_no_stale_file(tmp_path):
    write_tiny(tmp_path, num_shards=3)
    write_tiny(tmp_path, vision=False)
    assert sorted(_files(tmp_path)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    load_model(tmp_path, dtype=torch.float32)


def test_tiny_checkpoint_of_refused_configuration_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="compress_ratios holds 2"):
        write_tiny(tmp_path / "out", ratios=(0, 2))
    assert list(tmp_path.iterdir()) == []
