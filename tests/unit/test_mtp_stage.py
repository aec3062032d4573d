"""Plain MTP outside the engine: what is loaded, what is refused, and how its cached blocks are named."""

import pytest
import torch
from scheduling import BLOCK, WINDOW, image, request, small_model

from deepspan.errors import WeightsError
from deepspan.kv.families import DRAFT, cache_families
from deepspan.kv.keys import KeyChain
from deepspan.kv.manager import CacheManager
from deepspan.model.drafter import DSpark
from deepspan.model.mtp import Mtp
from deepspan.model.packed_linear import PackedLinear
from deepspan.ops.formats import Format
from deepspan.weights.load import load_model
from deepspan.weights.quantise import RECIPES, write_quantised
from deepspan.weights.table import DraftKind
from deepspan.weights.tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    return write_tiny(root / "mtp", ratios=(0, 4), draft_stages=1, draft_kind=DraftKind.MTP)


# --- loading


@pytest.mark.parametrize("drafts", [DraftKind.MTP, "auto"])
def test_stage_is_loaded_whole_under_its_names(folder, drafts):
    drafter = load_model(folder, dtype=torch.float32, drafts=drafts).drafter
    assert isinstance(drafter, Mtp)
    names = set(drafter.state_dict())
    assert {f"mtp.0.{part}.weight" for part in ("e_proj", "h_proj", "enorm", "hnorm", "norm")} <= names
    assert {"mtp.0.hc_head_fn", "mtp.0.attn.attn_sink", "mtp.0.ffn.gate.bias_vl"} <= names
    assert not any(value.is_meta for value in drafter.state_dict().values())


def test_stage_is_left_out_by_name_where_nobody_drafts(folder):
    loaded = load_model(folder, dtype=torch.float32)
    assert loaded.drafter is None
    assert loaded.left_out["mtp.0.e_proj.weight"] == "drafting is off"


def test_auto_loads_the_kind_that_is_there_or_nothing(folder, tmp_path):
    spark = write_tiny(tmp_path / "dspark", ratios=(0, 4), draft_stages=2)
    none = write_tiny(tmp_path / "none", ratios=(0, 4))
    assert isinstance(load_model(spark, dtype=torch.float32, drafts="auto").drafter, DSpark)
    assert load_model(none, dtype=torch.float32, drafts="auto").drafter is None
    with pytest.raises(WeightsError, match="dspark drafting was asked for, the checkpoint's draft stages are mtp"):
        load_model(folder, dtype=torch.float32, drafts=DraftKind.DSPARK)


def test_two_stages_of_plain_mtp_are_refused_only_where_they_would_draft(tmp_path):
    two = write_tiny(tmp_path / "two", ratios=(0, 4), draft_stages=2, draft_kind=DraftKind.MTP)
    for drafts in (DraftKind.MTP, "auto"):
        with pytest.raises(WeightsError, match="plain MTP is served with one stage, the checkpoint has 2"):
            load_model(two, dtype=torch.float32, drafts=drafts)
    assert load_model(two, dtype=torch.float32).drafter is None


def test_quantised_stage_stays_packed(folder, tmp_path):
    for recipe, dense, joins in (("fp8-fp4", Format.FP8, Format.FP8), ("w8a8", Format.INT8, None)):
        out = write_quantised(folder, tmp_path / recipe, RECIPES[recipe])
        drafter = load_model(out, dtype=torch.float32, drafts="auto").drafter
        assert isinstance(drafter, Mtp)
        formats = {n: m.format for n, m in drafter.named_modules() if isinstance(m, PackedLinear)}
        assert formats["mtp.0.attn.wq_b"] is dense
        assert formats.get("mtp.0.e_proj") is formats.get("mtp.0.h_proj") is joins


# --- blocks


def families(*, is_mtp=True):
    return cache_families(small_model(), BLOCK, 2, num_drafts=2, num_stages=1, is_mtp=is_mtp)


def test_rows_see_what_those_of_the_network_see_and_one_token_ahead():
    mtp, spark = (next(f for f in families(is_mtp=kind) if f.name == DRAFT) for kind in (True, False))
    assert (mtp.reach, mtp.looks_ahead) == (WINDOW - 1, True)
    assert (spark.reach, spark.looks_ahead) == (WINDOW, False)
    assert not any(family.looks_ahead for family in families() if family.name != DRAFT)


def test_key_with_next_tells_the_token_behind_the_block():
    one, other = ([1] * BLOCK + [token] for token in (2, 3))
    first, second, again = (KeyChain(ids, (), (), BLOCK) for ids in (one, other, list(one)))
    assert first.key(0) == second.key(0)
    assert first.key_with_next(0) != second.key_with_next(0)
    assert first.key_with_next(0) == again.key_with_next(0) != first.key(0)


@pytest.mark.parametrize(
    ("tokens", "with_mtp", "without"),
    [
        ([1] * 3 * BLOCK + [2], 3, 3),  # the same prompt
        ([1] * 3 * BLOCK + [9], 2, 3),  # another token right behind the last block
        ([1] * 2 * BLOCK + [9] * 20, 1, 2),
        ([1] * (2 * BLOCK + 1) + [9] * 20, 2, 2),  # the token behind the second block is the same
    ],
)
def test_hit_ends_where_the_token_behind_it_is_the_same(tokens, with_mtp, without):
    for is_mtp, expected in ((True, with_mtp), (False, without)):
        made = families(is_mtp=is_mtp)
        cache = CacheManager(made, {family.name: 40 for family in made})
        for number, wanted in enumerate((request([1] * 3 * BLOCK + [2]), request(tokens))):
            ids = wanted.token_ids.tolist()
            cache.open(number, ids, wanted.spans, KeyChain(ids, wanted.spans, wanted.images, BLOCK))
            found = cache.find_prefix(number)
            assert cache.admit(number, found, len(ids), len(ids)) is not None
            ids.append(7)  # what was chosen: the token behind a row is known when it is committed
            cache.commit(number, len(ids) - 1)
            cache.check()
            cache.close(number)
        assert found == expected * BLOCK


def test_block_before_an_image_is_shared_by_prompts_with_other_images():
    made = families()
    cache = CacheManager(made, {family.name: 40 for family in made})
    found = []
    for number, name in enumerate(("cat", "dog")):
        wanted = request([1] * BLOCK, image(name, 8), [5] * 3)
        ids = wanted.token_ids.tolist()
        cache.open(number, ids, wanted.spans, KeyChain(ids, wanted.spans, wanted.images, BLOCK))
        found.append(cache.find_prefix(number))
        cache.admit(number, found[-1], len(ids), len(ids))
        ids.append(7)
        cache.commit(number, len(ids) - 1)
        cache.close(number)
    assert found == [0, BLOCK]
