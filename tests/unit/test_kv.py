"""Cache accounting: pools, keys, hits, sliding release; the vectors of the runtime contracts (groups 5 and 12)."""

import pytest
from scheduling import BLOCK, image, request, small_cache, small_families, small_model

from deepspan.kv.encoder_cache import EncoderCache
from deepspan.kv.families import cache_families
from deepspan.kv.keys import KeyChain
from deepspan.kv.pool import BlockPool


def _open(cache, sequence_id, wanted):
    tokens = wanted.token_ids.tolist()
    chain = KeyChain(tokens, wanted.spans, wanted.images, BLOCK, wanted.cache_salt)
    cache.open(sequence_id, tokens, wanted.spans, chain)
    return tokens


def _compute(cache, sequence_id, wanted, upto=None):
    """Admit with whatever prefix is found and compute the rest in one go; returns the prefix."""
    tokens = _open(cache, sequence_id, wanted)
    end = len(tokens) if upto is None else upto
    prefix = cache.find_prefix(sequence_id)
    assert cache.admit(sequence_id, prefix, end, end) is not None
    cache.commit(sequence_id, end)
    cache.check()
    return prefix


def _keys(wanted, num_blocks):
    chain = KeyChain(wanted.token_ids.tolist(), wanted.spans, wanted.images, BLOCK, wanted.cache_salt)
    return [chain.key(block) for block in range(num_blocks)]


# Pool.


def test_pool_free_block_with_key_is_found_until_it_is_taken():
    pool = BlockPool(2)
    first = pool.take()
    assert pool.publish(first, "a")
    pool.release(first)
    assert pool.find("a") == first
    other = pool.take()  # the one without a key goes first
    assert other != first
    assert pool.take() == first
    assert pool.find("a") is None
    pool.check([first, other])


def test_pool_takes_the_block_that_is_longest_free():
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, "abc", strict=True):
        pool.publish(block, key)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.share(blocks[1])  # used again, so that it is the youngest
    pool.release(blocks[1])
    assert [pool.take() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_pool_same_content_twice_is_published_once():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert pool.publish(first, "a")
    assert not pool.publish(second, "a")
    pool.check([first, second])


def test_pool_check_notices_a_leak_and_a_block_held_twice():
    pool = BlockPool(2)
    block = pool.take()
    with pytest.raises(AssertionError, match="differ"):
        pool.check([])
    with pytest.raises(AssertionError, match="differ"):
        pool.check([block, block])


# Families.


def test_families_of_small_model_have_the_layers_and_rows_of_their_ratio():
    found = {f.name: (f.layers, f.block_rows) for f in small_families()}
    assert found == {
        "window": ((0, 1, 2), 16),
        "rows_4": ((1,), 4),
        "index_4": ((1,), 4),
        "state_4": ((1,), 8),
        "rows_16": ((2,), 1),
        "state_16": ((2,), 16),
    }


def test_families_ratio_zero_only_has_a_window_alone():
    import dataclasses

    config = dataclasses.replace(small_model(), compress_ratios=(0, 0, 0))
    assert [family.name for family in cache_families(config, BLOCK, 2)] == ["window"]


def test_families_with_drafts_keep_more_state_rows():
    states = {f.name: f.block_rows for f in cache_families(small_model(), 32, 2, num_drafts=6) if f.kind == "state"}
    assert states == {"state_4": 16, "state_16": 32}


def test_family_first_needed_follows_window_and_groups():
    by_name = {family.name: family for family in small_families()}
    assert [by_name["window"].first_needed(n) for n in (0, 5, 8, 9, 40)] == [0, 0, 1, 2, 33]
    # Ratio 4 goes on with the group before; ratio 16 needs nothing of complete groups.
    assert [by_name["state_4"].first_needed(n) for n in (3, 4, 7, 8, 16)] == [0, 0, 0, 4, 12]
    assert [by_name["state_16"].first_needed(n) for n in (15, 16, 17, 32)] == [0, 16, 16, 32]
    assert by_name["rows_4"].first_needed(99) == 0


# Keys (contracts 5.1, 5.2).


def test_key_of_block_names_the_images_that_overlap_it():
    chain = KeyChain(list(range(12)), *_placed(2, 6), block_tokens=4)
    assert [chain.key(block).images for block in range(3)] == [(("cat", 2),), (("cat", -2),), ()]


def _placed(offset, length):
    from deepspan.core.media import ImageSpan

    one = image("cat", 1)
    return [ImageSpan(offset=offset, first=offset, last=offset + length - 1)], [one]


def test_keys_of_two_images_of_one_size_differ_from_the_image_on():
    text = [1] * 20
    cat, dog = request(text, image("cat", 8), text), request(text, image("dog", 8), text)
    assert cat.token_ids.tolist() == dog.token_ids.tolist()
    equal = [a == b for a, b in zip(_keys(cat, 3), _keys(dog, 3), strict=True)]
    assert equal == [True, False, False]


def test_keys_same_content_is_equal_and_salt_separates():
    wanted = request([1] * 20, image("cat", 8), [2] * 20)
    assert _keys(wanted, 3) == _keys(request([1] * 20, image("cat", 8), [2] * 20), 3)
    assert not set(_keys(wanted, 3)) & set(_keys(request([1] * 20, image("cat", 8), [2] * 20, salt=b"x"), 3))


def test_keys_with_the_same_digest_and_other_tokens_are_not_a_hit():
    import dataclasses

    pool, key = BlockPool(1), _keys(request([1] * 16), 1)[0]
    pool.publish(pool.take(), key)
    assert pool.find(dataclasses.replace(key, token_ids=b"other")) is None


# Hits (contracts 5.3 to 5.6, 5.9, 5.12).


@pytest.mark.parametrize(
    ("length", "expected"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (47, 32), (48, 32), (49, 48)]
)
def test_hit_is_whole_blocks_and_leaves_a_token(length, expected):
    cache = small_cache()
    assert _compute(cache, 0, request([1] * length)) == 0
    cache.close(0)
    assert _compute(cache, 1, request([1] * length)) == expected


@pytest.mark.parametrize(
    ("offset", "rows", "expected"),
    [
        (20, 3, 16),  # the image begins after the boundary and ends on the next one
        (20, 8, 16),  # 32 lies inside
        (13, 12, 0),  # 16 lies inside, and 32 is where it ends
        (32, 8, 32),
    ],
)
def test_hit_inside_an_image_is_cut_back(offset, rows, expected):
    wanted = request([1] * offset, image("cat", rows), [2] * 3)
    longest = wanted.spans[0].last + 1
    cache = small_cache()
    _compute(cache, 0, wanted)
    cache.close(0)
    other = request([1] * offset, image("cat", rows), [3] * 3)
    found = _compute(cache, 1, other)
    assert found == max(b for b in range(0, longest + 1, BLOCK) if not offset < b < longest and b < longest + 3)
    assert found >= expected or found == 0


def test_hit_of_shorter_prompt_uses_the_tails_kept_at_its_boundary():
    cache = small_cache()
    _compute(cache, 0, request([1] * 100))
    cache.close(0)
    assert _compute(cache, 1, request([1] * 60, [2] * 30)) == 48


@pytest.mark.parametrize("family", ["window", "state_4", "rows_4", "index_4", "rows_16"])
def test_hit_needs_every_family_at_its_boundary(family):
    cache = small_cache()
    _compute(cache, 0, request([1] * 40))
    cache.close(0)
    pool = cache.pools[family]
    held = [pool.take() for _ in range(pool.num_free)]  # everything else of this family is forgotten
    for block in held:
        pool.release(block)
    _open(cache, 1, request([1] * 40))
    assert cache.find_prefix(1) == 0


def test_hit_falls_back_to_the_boundary_whose_window_is_still_there():
    cache = small_cache()
    wanted = request([1] * 49)
    _compute(cache, 0, wanted)
    cache.close(0)
    window = cache.pools["window"]
    last = window.find(_keys(wanted, 3)[2])
    window.share(last)
    window._forget(last)
    window.release(last)
    _open(cache, 1, wanted)
    assert cache.find_prefix(1) == 32


def test_only_committed_tokens_are_published():
    cache = small_cache()
    tokens = _open(cache, 0, request([1] * 15))
    cache.admit(0, 0, 15 + 6, 15)  # six drafts
    cache.commit(0, 15)
    tokens += [1, 1]
    _open(cache, 1, request([1] * 17))
    assert cache.find_prefix(1) == 0
    cache.commit(0, 16)
    assert cache.find_prefix(1) == 16


def test_prefix_caching_off_finds_nothing():
    cache = small_cache(prefix_caching=False)
    _compute(cache, 0, request([1] * 40))
    cache.close(0)
    assert _compute(cache, 1, request([1] * 40)) == 0


def test_forget_prefixes_finds_nothing_and_keeps_what_is_held():
    cache = small_cache()
    _compute(cache, 0, request([1] * 40))
    cache.forget_prefixes()
    cache.check()
    assert _compute(cache, 1, request([1] * 40)) == 0


# Reservation.


def test_reservation_takes_blocks_in_all_families_or_in_none():
    families = small_families()
    from deepspan.kv.manager import CacheManager

    cache = CacheManager(families, {f.name: 5 if f.name != "rows_16" else 2 for f in families})
    _open(cache, 0, request([1] * 60))
    free = {name: pool.num_free for name, pool in cache.pools.items()}
    assert cache.admit(0, 0, 40, 40) is None
    assert {name: pool.num_free for name, pool in cache.pools.items()} == free
    assert cache.admit(0, 0, 32, 32) is not None
    cache.commit(0, 32)
    assert cache.extend(0, 40) is None
    cache.check()


def test_admission_without_room_for_the_whole_prompt_is_refused():
    cache = small_cache(num_blocks=3)
    _open(cache, 0, request([1] * 60))
    assert cache.admit(0, 0, 16, 60) is None
    assert cache.admit(0, 0, 16, 48) is not None


def test_window_and_state_are_released_as_they_slide():
    cache = small_cache()
    _compute(cache, 0, request([1] * 200))
    tables = cache.tables(0)
    assert sum(block != 0 for block in tables["window"]) == 1  # tokens 193 to 199, block of 192
    assert sum(block != 0 for block in tables["rows_4"]) == 13
    assert cache.pools["window"].num_free == 39
    # What slid out can still be found.
    assert cache.pools["window"].num_cached == 12


def test_rollback_gives_back_what_was_reserved_ahead():
    cache = small_cache()
    _compute(cache, 0, request([1] * 30))
    cache.extend(0, 60)
    cache.rollback(0)
    cache.check()
    assert all(len(table) == 2 for table in cache.tables(0).values())


def test_release_and_close_return_every_block():
    cache = small_cache()
    _compute(cache, 0, request([1] * 100))
    cache.release(0)
    cache.check()
    assert all(pool.num_free == pool.num_blocks for pool in cache.pools.values())
    assert cache.find_prefix(0) == 96
    cache.close(0)
    cache.check()


# Encoder outputs (contracts 5.8, 12.7).


def test_encoder_cache_keeps_what_is_held_and_drops_the_oldest():
    cache = EncoderCache(10)
    assert cache.reserve("a", 4, 1)
    assert cache.reserve("b", 4, 1)
    assert not cache.reserve("c", 4, 2)
    cache.drop("a", 1)
    cache.drop("b", 1)
    cache.hold("a", 2)
    cache.drop("a", 2)
    assert cache.reserve("c", 4, 2)
    assert cache.take_dropped() == ("b",)
    assert "a" in cache
    cache.check({2})


def test_encoder_cache_failed_image_is_forgotten_though_held():
    cache = EncoderCache(10)
    cache.reserve("a", 4, 1)
    cache.forget("a")
    assert "a" not in cache
    assert cache.num_rows == 0
    cache.drop("a", 1)
    cache.check(set())
