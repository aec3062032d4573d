"""Caches in fewer bits: rows of 584 bytes are the rows rounded as the release rounds them, and nothing else changes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from network_helpers import batch_of, logits_of, make_prompt, relative_error
from test_paged_network import Paged

from deepspan import LLM, SamplingParams
from deepspan.bundled import bundled_model
from deepspan.config.engine import EngineConfig
from deepspan.config.model import load_model_config
from deepspan.errors import ConfigError
from deepspan.kv.families import cache_families
from deepspan.ops.attention import sparse_attention
from deepspan.ops.rounding import pack_kv_rows, round_kv_rows
from deepspan.ops.rows import FlatRows, PagedRows, store_rows

ROPE = 8
DEMO = Path(__file__).parents[2] / "docs" / "images" / "demo.png"


def rounded(rows):
    """Flat rows as an 8-bit cache would give them back."""
    if rows is None:
        return None
    values = round_kv_rows(rows.rows, ROPE).float()
    values[:, -ROPE:] = rows.rows[:, -ROPE:].bfloat16().float()
    return dataclasses.replace(rows, rows=values)


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 128, 4), index_topk=256)  # room for all entries: rounding changes no choice


@pytest.fixture(scope="module")
def prompt(model):
    return make_prompt([20, (6, 9), 150, (3, 3), 9], model.config.vocab_size, 5)


@pytest.mark.parametrize("cuts", [(), (20, 130, 131, 200)], ids=["whole", "chunks"])
def test_packed_cache_gives_the_logits_of_rounded_rows(model, prompt, cuts):
    def attention(q, rows, row_lo, row_hi, entries, *rest):
        return sparse_attention(q, rounded(rows), row_lo, row_hi, rounded(entries), *rest)

    batch = batch_of(model, [prompt])
    expected = logits_of(model.with_ops(sparse_attention=attention), batch)
    paged = Paged(model, block_tokens=128, num_blocks=8, kv_dtype="fp8")
    paged.open("a", prompt)
    found = paged.run("a", 0, prompt, cuts)
    assert relative_error(found, expected) < 1e-4
    assert relative_error(found, logits_of(model.network, batch)) > 1e-3  # it does round


def test_packed_caches_take_the_bytes_that_families_count(model):
    paged = Paged(model, kv_dtype="fp8")
    layer = paged.caches.layers[1]
    assert layer.window.dtype == layer.entries.dtype == torch.uint8
    assert layer.index.dtype != torch.uint8
    sizes = {family.name: family.row_bytes for family in paged.families}
    assert layer.window.shape[-1] == layer.entries.shape[-1] == sizes["window"] == sizes["rows_4"] == 24 + 2 * 8 + 8


def test_packed_rows_of_the_release_take_584_bytes():
    families = {f.name: f for f in cache_families(load_model_config(bundled_model()), 128, 2, is_packed=True)}
    assert families["window"].row_bytes == families["rows_4"].row_bytes == families["rows_128"].row_bytes == 584
    assert families["index_4"].row_bytes == 256


def test_store_rows_packs_into_bytes_and_reads_them_back():
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(3, 4, 48, dtype=torch.uint8)
    store_rows(rows, cache, torch.tensor([4, 5, 6, 7, 8]), ROPE)
    assert torch.equal(cache.flatten(0, 1)[4:9], pack_kv_rows(rows, ROPE))
    paged = PagedRows(cache=cache, tables=torch.tensor([[1, 2]]), places=(0,), packed=(32, ROPE))
    expected = rounded(FlatRows(rows=rows, firsts=(0,))).rows
    assert torch.equal(paged.read(0, 1, 5), expected[1:])
    numbers = torch.tensor([[3], [0]])
    assert torch.equal(paged.pick(0, numbers), expected[numbers])
    assert paged.dtype == torch.float32


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8"])
def test_bundled_model_answers_right_whatever_the_caches_are_kept_in(kv_dtype):
    llm = LLM(bundled_model(), device="cpu", engine=EngineConfig(kv_dtype=kv_dtype, max_num_seqs=2))
    part = {"type": "image", "image": DEMO}
    content = [part, {"type": "text", "text": "What colour is the diamond?"}]
    out = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=8))
    assert out.text == "yellow"


def test_unknown_kv_dtype_is_refused_by_name():
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, bfloat16, fp8, found 'int4'"):
        EngineConfig(kv_dtype="int4")
