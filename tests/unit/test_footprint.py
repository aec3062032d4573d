"""What a device would hold, worked out from headers, is what a run holds."""

import json

import pytest
import torch
from quantised_helpers import stored_tensors

from deepspan import LLM
from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.runtime.footprint import footprint
from deepspan.weights.inventory import DRAFT_EXPERTS, EXPERTS, stored_or_expected
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny

CACHE = 1 << 26
LIMITS = {"max_model_len": 300, "max_num_seqs": 3, "max_batched_tokens": 450}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("footprint")
    plain = write_tiny(root / "plain", ratios=(0, 4, 128, 4), draft_stages=2)
    packed = {name: write_quantised(plain, root / name, RECIPES[name]) for name in ("fp8-fp4", "w8a8")}
    mtp = write_tiny(root / "mtp", ratios=(0, 4, 128, 4), draft_stages=1, draft_kind=DraftKind.MTP)
    return {"plain": plain, "mtp": mtp} | packed


def _found(folder, *, dtype=torch.float32, engine=None, **options):
    config, stored = stored_or_expected(folder)
    limits = engine or EngineConfig(**LIMITS, draft_method="off")
    if "device_bytes" not in options:
        options = {"cache_bytes": CACHE} | options
    return footprint(stored, config, limits, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("recipe", "draft_method"),
    [*((recipe, method) for recipe in ("plain", "fp8-fp4", "w8a8") for method in ("off", "dspark")), ("mtp", "mtp")],
)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_footprint_is_what_a_run_holds(folders, recipe, kv_dtype, draft_method):
    engine = EngineConfig(**LIMITS, kv_dtype=kv_dtype, draft_method=draft_method)
    found = _found(folders[recipe], engine=engine)
    llm = LLM(folders[recipe], device="cpu", engine=engine, cache_bytes=CACHE)
    runner = llm._runner
    drafting = runner._drafting.num_bytes if runner._drafting is not None else 0
    assert found.caches == runner._caches.num_bytes
    assert found.buffers == runner._builder.num_bytes + drafting
    assert found.capacity == llm.capacity
    assert (drafting > 0) == (draft_method != "off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["plain", "fp8-fp4", "w8a8", "mtp"])
def test_weights_of_a_footprint_are_those_of_a_loaded_model(folders, recipe, dtype):
    kind = DraftKind.MTP if recipe == "mtp" else DraftKind.DSPARK
    engine = EngineConfig(**LIMITS, draft_method=kind.value)
    loaded = load_model(folders[recipe], dtype=dtype, drafts=kind)
    values = loaded.network.state_dict() | loaded.drafter.state_dict()
    found = _found(folders[recipe], dtype=dtype, engine=engine)
    assert sum(found.weights.values()) == sum(value.nbytes for value in values.values())
    assert "unknown" not in found.weights


@pytest.mark.parametrize("recipe", ["plain", "fp8-fp4"])
def test_read_bytes_of_a_footprint_are_those_of_the_files_less_what_is_left_out(folders, recipe):
    stored = stored_tensors(folders[recipe])
    total = sum(tensor.nbytes for tensor in stored.values())
    drafts = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("mtp."))
    hash_bias = stored["layers.0.ffn.gate.bias"].nbytes
    assert _found(folders[recipe]).read == total - drafts - hash_bias
    drafting = EngineConfig(**LIMITS, draft_method="dspark")
    assert _found(folders[recipe], engine=drafting).read == total - hash_bias


def test_footprint_of_stacked_experts_reads_each_once(tmp_path):
    folder = write_tiny(tmp_path / "renamed", ratios=(0, 4), transformers_names=True)
    total = sum(tensor.nbytes for tensor in stored_tensors(folder).values())
    assert _found(folder).read == total - 8 * 4  # the bias of the hash layer


def test_devices_share_routed_experts_and_nothing_else(folders):
    engine = EngineConfig(**LIMITS, draft_method="dspark")
    alone, shared = (_found(folders["fp8-fp4"], engine=engine, num_ranks=ranks) for ranks in (1, 4))
    for part, size in alone.weights.items():
        assert shared.weights[part] * (4 if part in (EXPERTS, DRAFT_EXPERTS) else 1) == size
    assert (shared.caches, shared.capacity) == (alone.caches, alone.capacity)
    assert shared.read < alone.read


def test_devices_that_do_not_divide_the_experts_are_refused(folders):
    with pytest.raises(ConfigError, match="3 ranks do not divide n_routed_experts 8"):
        _found(folders["plain"], num_ranks=3)


def test_caches_take_nine_tenths_of_what_a_device_has_left(folders):
    found = _found(folders["plain"], device_bytes=1 << 28)
    left = (1 << 28) - sum(found.weights.values()) - found.step
    assert 0.95 * 0.9 * left < found.capacity.num_bytes <= 0.9 * left
    assert found.total < 1 << 28


def test_device_smaller_than_the_weights_is_refused_with_the_numbers(folders):
    with pytest.raises(ConfigError, match=r"weights take [\d,]+ bytes .* the device has 1,000: nothing is left"):
        _found(folders["plain"], device_bytes=1000)


def test_activations_are_streams_with_queries_or_logits(folders):
    raw = json.loads((folders["plain"] / "config.json").read_text())
    streams = 450 * raw["hc_mult"] * raw["hidden_size"] * 4
    queries = 450 * raw["num_attention_heads"] * raw["head_dim"] * 4
    logits = 3 * raw["vocab_size"] * 4
    assert queries + streams > logits
    assert _found(folders["plain"]).step == 2 * streams + queries


def test_activations_of_a_large_vocabulary_are_its_logits(tmp_path):
    raw = {"vocab_size": 50_000}
    folder = write_tiny(tmp_path / "wide", ratios=(0,), vision=False, overrides=raw)
    raw = json.loads((folder / "config.json").read_text())
    engine = EngineConfig(**LIMITS | {"max_num_seqs": 450})
    streams = 450 * raw["hc_mult"] * raw["hidden_size"] * 4
    assert _found(folder, engine=engine).step == streams + 450 * 50_000 * 4


def test_family_use_counts_whole_blocks(folders):
    uses = {use.family.name: use for use in _found(folders["plain"]).families}
    window, rows, state = uses["window"], uses["rows_4"], uses["state_128"]
    assert (window.per_token, state.per_token) == (0, 0)
    assert rows.per_token == 2 * 32 * 4 / 4  # two layers, an entry of 32 numbers for four tokens
    assert rows.decoding == rows.prefilling == 3 * rows.family.block_bytes
    assert window.decoding == window.family.block_bytes * 2
    assert window.prefilling == window.family.block_bytes * 3


def test_family_use_has_room_for_drafts_behind_the_last_token(folders):
    """384 tokens are three blocks; five drafts behind them take a fourth."""
    limits = LIMITS | {"max_model_len": 384}
    engines = (EngineConfig(**limits), EngineConfig(**limits, draft_method="dspark"))
    found = [{u.family.name: u for u in _found(folders["plain"], engine=engine).families} for engine in engines]
    assert [uses["rows_4"].decoding // uses["rows_4"].family.block_bytes for uses in found] == [3, 4]
