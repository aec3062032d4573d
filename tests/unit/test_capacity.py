"""Capacity by whole blocks: the formulas and numbers of the runtime contracts (group 12)."""

import pytest
import released
from scheduling import small_engine, small_families

from deepspan.config.engine import EngineConfig
from deepspan.config.model import parse_model_config
from deepspan.errors import ConfigError
from deepspan.kv.capacity import (
    capacity_of,
    full_blocks,
    lengths_text,
    plan_capacity,
    request_blocks,
    sliding_blocks,
)
from deepspan.kv.families import cache_families

LENGTH, IN_FLIGHT = 133_120, 4096


def test_blocks_of_the_published_geometry():
    """Source tokens per block 128 (ratio 4), 4096 (ratio 128), 32 (window), 2 and 8 (states)."""
    counts = (
        full_blocks(LENGTH, 128),
        full_blocks(LENGTH, 4096),
        sliding_blocks(127, IN_FLIGHT, LENGTH, 32),
        sliding_blocks(7, IN_FLIGHT, LENGTH, 2),
        sliding_blocks(127, IN_FLIGHT, LENGTH, 8),
    )
    assert counts == (1040, 33, 133, 2053, 529)
    assert sum(counts) == 3788


def test_blocks_of_a_window_after_4096_tokens_while_decoding():
    assert sliding_blocks(127, 1, 4096, 32) == 5


def test_request_needs_no_more_sliding_blocks_than_it_has_tokens():
    window = small_families()[0]
    assert request_blocks(window, 20, 48) == 2
    assert request_blocks(window, 250, 48) == 5


def test_capacity_is_counted_in_whole_requests():
    """2.9957 requests' worth of tokens serve two at once."""
    families, engine = small_families(), small_engine()
    rows = 16 * 3 - 1
    counts = {family.name: rows if family.kind == "rows" else 100 for family in families}
    capacity = capacity_of(families, engine, counts)
    assert capacity.max_requests == 2
    assert capacity.num_tokens == rows * 16


def test_tokens_worth_almost_three_requests_are_not_shown_as_three():
    """The published pool: 398,789 tokens for requests of 133,120, which is 2.9957 of them, is often printed as 3.0."""
    assert lengths_text(398_789, LENGTH) == "2.99"
    assert lengths_text(3 * LENGTH, LENGTH) == "3.00"
    assert lengths_text(1_234 * LENGTH + 1, LENGTH) == "1,234.00"
    families = cache_families(parse_model_config(released.flash_vision()), 128, 2)
    engine = EngineConfig(max_model_len=LENGTH, max_batched_tokens=IN_FLIGHT)
    for tokens, requests in ((398_789, 2), (3 * LENGTH - 1, 2), (3 * LENGTH, 3)):
        counts = {family.name: tokens // 128 if family.kind == "rows" else 10_000 for family in families}
        assert capacity_of(families, engine, counts).max_requests == requests


def test_planned_capacity_stays_within_memory_and_serves_the_longest_request():
    config = parse_model_config(released.flash_vision())
    engine = EngineConfig(max_model_len=131_072, max_batched_tokens=4096).checked(config)
    families = cache_families(config, 128, 2)
    for budget in (8 << 30, 64 << 30):
        capacity = plan_capacity(families, engine, budget)
        assert 0.9 * budget < capacity.num_bytes <= budget
        assert capacity.max_requests == min(32, capacity.num_blocks["rows_4"] // 1024) >= 1
        assert capacity.num_tokens >= 131_072


def test_too_little_memory_is_an_error_with_the_numbers():
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes .* 256 tokens .* it may take 1,000"):
        plan_capacity(small_families(), small_engine(), 1000)


def test_engine_config_refuses_a_step_smaller_than_the_largest_image():
    config = parse_model_config(released.flash_vision())
    with pytest.raises(ConfigError, match="387 tokens in one step, max_batched_tokens is 386"):
        EngineConfig(max_batched_tokens=386, max_num_seqs=1).checked(config)
    # 20 decodes with 6 drafts leave too little of 400 tokens for an image, for ever.
    with pytest.raises(ConfigError, match="below 527"):
        EngineConfig(max_batched_tokens=400, max_num_seqs=20, num_drafts=6).checked(config)
    assert EngineConfig(max_batched_tokens=527, max_num_seqs=20, num_drafts=6).checked(config).max_num_seqs == 20


@pytest.mark.parametrize(("field", "value"), [("max_num_seqs", 0), ("block_tokens", 1.5), ("prefix_caching", 1)])
def test_engine_config_refuses_wrong_values(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_engine_config_refuses_blocks_that_cut_groups():
    config = parse_model_config(released.flash_vision())
    with pytest.raises(ConfigError, match="block_tokens 64 is not a multiple of compress ratio 128"):
        EngineConfig(block_tokens=64).checked(config)
