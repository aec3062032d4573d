"""Slot lists against the golden vectors of the runtime contracts (3.2 to 3.4)."""

import numpy as np
import pytest
import torch

from deepspan.core.media import ImageSpan
from deepspan.ops.slots import index_width, window_slots
from deepspan.runtime.visibility import visible_intervals

VECTORS = {  # window, longest span, block size; per sequence: table, start, end, spans; lens; slots of some rows
    "A": (2, 4, 4, [([10, 11], 0, 8, [(2, 5)])], [1, 2, 5, 4, 4, 4, 2, 2],
          {0: [40], 2: [41, 42, 43, 44, 45], 3: [42, 43, 44, 45], 6: [45, 46]}),
    "B": (3, 5, 4, [([7, 2, 9], 0, 12, [(4, 8)])], [1, 2, 3, 3, 7, 6, 5, 5, 5, 3, 3, 3],
          {4: [30, 31, 8, 9, 10, 11, 36], 6: [8, 9, 10, 11, 36], 9: [11, 36, 37]}),
    "C two requests": (2, 4, 4, [([3, 8], 0, 8, [(1, 2), (5, 7)]), ([11, 5], 0, 8, [(3, 6)])],
                       [1, 3, 2, 2, 2, 4, 3, 3, 1, 2, 2, 5, 4, 4, 4, 2],
                       {5: [32, 33, 34, 35], 11: [46, 47, 20, 21, 22]}),
    "C swapped": (2, 4, 4, [([11, 5], 0, 8, [(3, 6)]), ([3, 8], 0, 8, [(1, 2), (5, 7)])],
                  [1, 2, 2, 5, 4, 4, 4, 2, 1, 3, 2, 2, 2, 4, 3, 3],
                  {3: [46, 47, 20, 21, 22], 13: [32, 33, 34, 35]}),
    "D after a hit": (4, 6, 4, [([5, 6, 7, 8], 8, 16, [(9, 12)])], [4, 7, 6, 5, 4, 4, 4, 4],
                      {0: [25, 26, 27, 28], 1: [26, 27, 28, 29, 30, 31, 32], 4: [29, 30, 31, 32], 7: [32, 33, 34, 35]}),
    "E decode and prompt": (3, 4, 4, [([4, 9], 5, 6, [(1, 3)]), ([2, 3], 0, 6, [(1, 4)])], [3, 1, 5, 5, 4, 4, 3],
                            {0: [19, 36, 37], 3: [8, 9, 10, 11, 12], 4: [9, 10, 11, 12], 6: [11, 12, 13]}),
}  # fmt: skip


def slots_of(window, longest, block, sequences, width=None):
    longest_table = max(len(table) for table, *_ in sequences)
    bounds, tables = [], []
    for table, start, end, spans in sequences:
        placed = [ImageSpan(offset=a, first=a, last=b) for a, b in spans]
        bounds.append(np.stack(visible_intervals(start, end, window, placed)))
        tables += [table + [0] * (longest_table - len(table))] * (end - start)
    lo, hi = torch.from_numpy(np.concatenate(bounds, axis=1))
    width = index_width(window, longest, has_spans=True) if width is None else width
    return window_slots(lo, hi, torch.tensor(tables), block, width)


@pytest.mark.parametrize("name", VECTORS)
def test_slots_equal_the_golden_vector(name):
    window, longest, block, sequences, lengths, rows = VECTORS[name]
    slots, lens = slots_of(window, longest, block, sequences)
    assert slots.dtype == lens.dtype == torch.int32
    assert slots.shape == (len(lengths), window + longest)
    assert lens.tolist() == lengths
    for row, expected in rows.items():
        assert slots[row].tolist() == expected + [-1] * (window + longest - len(expected))
    for row, length in zip(slots.tolist(), lengths, strict=True):
        assert all(slot >= 0 for slot in row[:length])
        assert all(slot == -1 for slot in row[length:])


def test_width_is_the_window_alone_where_no_span_is_active():
    assert index_width(128, 384, has_spans=False) == 128
    assert index_width(128, 384, has_spans=True) == 512


def test_text_alone_fits_the_narrow_list():
    slots, lens = slots_of(2, 4, 4, [([10, 11], 0, 8, [])], width=2)
    assert lens.tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
    assert slots[7].tolist() == [46, 47]


def test_longest_list_is_that_of_a_span_after_a_full_window():
    _, lens = slots_of(2, 4, 4, [([10, 11, 12], 4, 9, [(5, 8)])])
    assert int(lens.max()) == 5
