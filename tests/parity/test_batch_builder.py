"""Batches of several sequences: flat indices, entry ranges and query blocks, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from network_helpers import batch_of, make_prompt, sequence
from oracle import layout

from deepspan.errors import InputError
from deepspan.runtime.batch_builder import QUERY_BLOCK, build_batch

PARTS = [[5, (12, 15), 3, (3, 6), 4], [2], [(6, 6), 140], [17]]


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(ratios=(0, 4, 16, 4))


@pytest.fixture(scope="module")
def prompts(model):
    return [make_prompt(parts, model.config.vocab_size, seed) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def batch(model, prompts):
    return batch_of(model, prompts)


def starts_of(prompts) -> list[int]:
    return np.cumsum([0, *(len(prompt) for prompt in prompts)]).tolist()


def test_batch_rows_count_positions_from_zero_in_every_sequence(batch, prompts):
    assert [part.last - part.first for part in batch.parts] == [len(prompt) for prompt in prompts]
    expected = [position for prompt in prompts for position in range(len(prompt))]
    assert batch.positions.tolist() == expected
    assert batch.kinds.tolist() == np.concatenate([prompt.kinds for prompt in prompts]).tolist()


def test_batch_intervals_stay_inside_their_sequence(batch, prompts, model):
    row = 0
    for prompt in prompts:
        spans = [(span.first, span.last) for span in prompt.spans]
        for query in range(len(prompt)):
            visible = layout.raw_visible(query, model.config.sliding_window, spans)
            assert int(batch.attention.row_lo[row]) == min(visible)
            assert int(batch.attention.row_hi[row]) == max(visible)
            row += 1


@pytest.mark.parametrize("ratio", [4, 16])
def test_batch_entries_stay_inside_their_sequence_and_causal(batch, prompts, ratio):
    meta = batch.attention.compressed[ratio]
    assert meta.num_entries == tuple(len(prompt) // ratio for prompt in prompts)
    assert meta.positions.tolist() == [i * ratio for prompt in prompts for i in range(len(prompt) // ratio)]
    expected = [(query + 1) // ratio for prompt in prompts for query in range(len(prompt))]
    assert meta.entry_hi.tolist() == expected


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_batch_blocks_cover_every_query_once_and_all_it_sees(batch, prompts, ratio):
    starts, meta = starts_of(prompts), batch.attention
    reached = 0
    for block in meta.blocks[ratio]:
        first, last = block.queries
        assert first == reached < last <= first + QUERY_BLOCK
        assert starts[block.sequence] <= first < last <= starts[block.sequence + 1]
        assert not any(first < start < last for start in starts)
        assert block.rows == (int(meta.row_lo[first:last].min()), int(meta.row_hi[first:last].max()) + 1)
        if ratio:
            assert block.num_entries == int(meta.compressed[ratio].entry_hi[first:last].max())
        reached = last
    assert reached == starts[-1]


def test_batch_image_rows_are_the_image_tokens_in_order(batch):
    assert batch.image_rows.tolist() == np.flatnonzero(batch.kinds.numpy() == layout.IMAGE).tolist()
    assert len(batch.image_features) == len(batch.image_rows)


def test_batch_wanted_rows_are_flat(model, prompts):
    inputs = [dataclasses.replace(sequence(prompt, None), wanted=(len(prompt) - 1,)) for prompt in prompts[1::2]]
    assert build_batch(inputs, model.config, "cpu").logits_rows.tolist() == [1, 18]


def test_build_batch_with_span_that_misses_its_kinds_is_refused(model, prompts):
    moved = tuple(dataclasses.replace(span, first=span.first + 1) for span in prompts[0].spans)
    wrong = dataclasses.replace(sequence(prompts[0], None), spans=moved)
    with pytest.raises(InputError, match="image span"):
        build_batch([wrong], model.config, "cpu")


def test_build_batch_with_image_tokens_but_no_span_is_refused(model, prompts):
    wrong = dataclasses.replace(sequence(prompts[0], None), spans=())
    with pytest.raises(InputError, match="outside every image span"):
        build_batch([wrong], model.config, "cpu")


def test_build_batch_with_missing_feature_rows_is_refused(model, prompts):
    features = torch.zeros(3, model.config.hidden_size)
    with pytest.raises(AssertionError, match="3 feature rows"):
        build_batch([sequence(prompts[0], features)], model.config, "cpu")
