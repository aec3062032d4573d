"""Visible intervals and entry counts against the golden tables of the release and against plain sets."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import layout

from deepspan.core.media import ImageSpan
from deepspan.errors import InputError
from deepspan.runtime.visibility import check_chunk, num_visible_entries, visible_intervals


def spans_of(*bounds: tuple[int, int]) -> list[ImageSpan]:
    """Spans with as many lead pads as fit, up to three: pads must make no difference to what is seen."""
    free = [0, *(last + 1 for _, last in bounds)]
    return [
        ImageSpan(offset=max(first - 3, start), first=first, last=last)
        for (first, last), start in zip(bounds, free, strict=False)
    ]


def intervals(num_tokens: int, window: int, *bounds: tuple[int, int]) -> list[tuple[int, int]]:
    lo, hi = visible_intervals(0, num_tokens, window, spans_of(*bounds))
    return list(zip(lo.tolist(), hi.tolist(), strict=True))


# --- golden tables ----------------------------------------------------------------------------------------------


def test_intervals_of_two_images_equal_golden_ranges():
    """5 text, a 4 x 5 image, 3 text, a 1 x 2 image, 4 text; window 8."""
    found = intervals(53, 8, (7, 32), (39, 48))
    golden = {5: (0, 5), 6: (0, 6), 7: (0, 32), 8: (1, 32), 14: (7, 32), 32: (7, 32), 33: (26, 33), 38: (31, 38)}
    golden |= {39: (32, 48), 45: (38, 48), 46: (39, 48), 48: (39, 48), 49: (42, 49)}
    assert {query: found[query] for query in golden} == golden


@pytest.mark.parametrize(
    ("query", "interval", "num_keys", "num_ratio_4", "num_ratio_128"),
    [
        (130, (3, 130), 128, 32, 1),  # lead pad
        (131, (4, 476), 473, 33, 1),  # START
        (132, (5, 476), 472, 33, 1),
        (258, (131, 476), 346, 64, 2),
        (300, (131, 476), 346, 75, 2),
        (476, (131, 476), 346, 119, 3),  # END
        (477, (350, 477), 128, 119, 3),
        (516, (389, 516), 128, 129, 4),
    ],
)
def test_intervals_at_real_size_equal_golden_table(query, interval, num_keys, num_ratio_4, num_ratio_128):
    """130 text, an 18 x 18 image, 40 text; window 128."""
    assert intervals(517, 128, (131, 476))[query] == interval
    assert interval[1] - interval[0] + 1 == num_keys
    assert num_visible_entries(0, 517, 4)[query] == num_ratio_4
    assert num_visible_entries(0, 517, 128)[query] == num_ratio_128


def test_intervals_of_adjacent_images_keep_spans_apart():
    """2 x 2 and 2 x 3 images from position 6; lead pads at 6, 17, 18 see the past only."""
    found = intervals(32, 8, (7, 16), (19, 28))
    assert found[6] == (0, 6)
    assert found[16] == (7, 16)
    assert found[17] == (10, 17)
    assert found[18] == (11, 18)
    assert found[19] == (12, 28)
    assert found[28] == (19, 28)
    assert found[29] == (22, 29)


SLOT_VECTORS = {  # block table, window, block size, tokens, spans, first row of the step, lengths, slots of some rows
    "A": ([10, 11], 2, 4, 8, [(2, 5)], 0, [1, 2, 5, 4, 4, 4, 2, 2],
          {0: [40], 2: [41, 42, 43, 44, 45], 3: [42, 43, 44, 45], 5: [42, 43, 44, 45], 6: [45, 46]}),
    "B": ([7, 2, 9], 3, 4, 12, [(4, 8)], 0, [1, 2, 3, 3, 7, 6, 5, 5, 5, 3, 3, 3],
          {4: [30, 31, 8, 9, 10, 11, 36], 6: [8, 9, 10, 11, 36], 8: [8, 9, 10, 11, 36], 9: [11, 36, 37]}),
    "C_first": ([3, 8], 2, 4, 8, [(1, 2), (5, 7)], 0, [1, 3, 2, 2, 2, 4, 3, 3], {5: [32, 33, 34, 35]}),
    "C_second": ([11, 5], 2, 4, 8, [(3, 6)], 0, [1, 2, 2, 5, 4, 4, 4, 2], {3: [46, 47, 20, 21, 22]}),
    "D_after_hit": ([5, 6, 7, 8], 4, 4, 16, [(9, 12)], 8, [4, 7, 6, 5, 4, 4, 4, 4],
                    {8: [25, 26, 27, 28], 9: [26, 27, 28, 29, 30, 31, 32], 12: [29, 30, 31, 32], 15: [32, 33, 34, 35]}),
    "E_decode": ([4, 9], 3, 4, 6, [(1, 3)], 5, [3], {5: [19, 36, 37]}),
    "E_prefill": ([2, 3], 3, 4, 6, [(1, 4)], 0, [1, 5, 5, 4, 4, 3],
                  {2: [8, 9, 10, 11, 12], 3: [9, 10, 11, 12], 4: [9, 10, 11, 12], 5: [11, 12, 13]}),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOT_VECTORS)
def test_intervals_as_slots_equal_golden_vector(name):
    """Row 3 of E_prefill: [1, 4] with a window of 3; the interval turned into cache slots is the golden row."""
    table, window, block, num_tokens, bounds, first_row, lengths, rows = SLOT_VECTORS[name]
    found = intervals(num_tokens, window, *bounds)
    assert [hi - lo + 1 for lo, hi in found[first_row:]] == lengths
    for row, slots in rows.items():
        lo, hi = found[row]
        assert [table[p // block] * block + p % block for p in range(lo, hi + 1)] == slots


@pytest.mark.parametrize(
    ("query", "end", "span", "message"),
    [
        (4, 4, (2, 5), "single prefill chunk"),
        (4, 8, (2, 5), "single prefill chunk"),  # cut on the left, as a bad prefix hit would
        (4, 8, (5, 4), "invalid"),
        (8, 16, (8, 13), "exceeds vision_max_n_token 4"),
        (4, 8, (4, 7), None),
        (1, 9, (4, 7), None),
        (4, 4, (4, 7), None),
    ],
)
def test_chunk_that_cuts_a_span_is_refused(query, end, span, message):
    """Contract 2.6: `query` tokens of a step that ends at `end`; spans of up to 4."""
    spans = [ImageSpan(offset=span[0], first=span[0], last=span[1])]
    if message is None:
        check_chunk(end - query, end, spans, 4)
        return
    with pytest.raises(InputError, match=message):
        check_chunk(end - query, end, spans, 4)


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 33), (7, 39)])
def test_intervals_of_chunks_are_those_of_the_whole(cuts):
    spans, edges = spans_of((7, 32), (39, 48)), [0, *cuts, 53]
    whole = np.stack(visible_intervals(0, 53, 8, spans))
    chunks = [np.stack(visible_intervals(a, b, 8, spans)) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(chunks, axis=1), whole)
    entries = [num_visible_entries(a, b, 4) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(entries), num_visible_entries(0, 53, 4))


# --- laws -------------------------------------------------------------------------------------------------------


def test_interval_of_first_token_is_itself():
    assert intervals(1, 128) == [(0, 0)]


def test_window_at_128_drops_first_token_only():
    found = intervals(130, 128)
    assert (found[127], found[128], found[129]) == ((0, 127), (1, 128), (2, 129))


def test_span_behind_the_prompt_is_refused():
    with pytest.raises(AssertionError, match="materialised"):
        visible_intervals(0, 5, 4, spans_of((2, 5)))


@pytest.mark.parametrize("ratio", [4, 16, 128])
def test_entry_becomes_visible_at_last_token_of_its_group(ratio):
    found = num_visible_entries(0, 3 * ratio, ratio)
    assert [found[t] for t in (0, ratio - 2, ratio - 1, 2 * ratio - 2, 2 * ratio - 1)] == [0, 0, 1, 1, 2]
    assert found[-1] == 3


grids = st.tuples(st.integers(1, 5), st.integers(1, 5))
prompts = st.lists(st.one_of(st.integers(1, 20), grids), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompts, st.integers(1, 40))
def test_intervals_of_any_prompt_equal_oracle_sets(parts, window):
    _, kinds = layout.assemble([[9] * part if isinstance(part, int) else part for part in parts])
    bounds = layout.find_spans(kinds)
    found = intervals(len(kinds), window, *bounds)
    for query, (lo, hi) in enumerate(found):
        assert set(range(lo, hi + 1)) == layout.raw_visible(query, window, bounds)
    lo, hi = np.transpose(found)
    assert np.all(np.diff(hi) >= 0)  # nobody sees farther than those after it: no chain of rows leads ahead
    assert all(hi[hi[query]] == hi[query] for query in range(len(found)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.sampled_from([4, 8, 16, 128]))
def test_entry_counts_of_any_length_equal_oracle_sets(num_tokens, ratio):
    found = num_visible_entries(0, num_tokens, ratio)
    assert found.tolist() == [len(layout.entries_visible(query, ratio)) for query in range(num_tokens)]
