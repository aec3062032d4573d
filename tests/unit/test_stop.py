"""Stop strings: found however the text is cut, held back only while they might be coming."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspan.text.stop import StopStrings


def run(stops, pieces):
    watch = StopStrings(stops)
    out = [watch.push(piece) for piece in pieces]
    return "".join(out) + (watch.finish() if watch.found is None else ""), watch.found


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["END"], ["abENDcd"], "ab", "END"),
        (["END"], ["abE", "N", "Dcd"], "ab", "END"),
        (["END"], ["abE", "N", "x"], "abENx", None),
        (["END"], ["abEN"], "abEN", None),
        (["b", "abc"], ["abc"], "a", "b"),  # complete first
        (["bc", "abc"], ["abc"], "", "abc"),  # complete together: the longer one begins first
        (["aab"], ["aaab"], "a", "aab"),
        ([], ["any"], "any", None),
    ],
)
def test_text_up_to_the_first_stop_string(stops, pieces, text, found):
    assert run(stops, pieces) == (text, found)


def test_text_after_a_stop_string_is_not_given_out():
    watch = StopStrings(["x"])
    assert [watch.push("ax"), watch.push("b")] == ["a", ""]


def test_what_cannot_begin_a_stop_string_is_given_out_at_once():
    watch = StopStrings(["stop"])
    assert [watch.push("list of st"), watch.push("arc")] == ["list of ", "starc"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.lists(st.text("ab", max_size=4)))
def test_result_does_not_depend_on_the_cuts(stops, pieces):
    text = "".join(pieces)
    assert run(stops, pieces) == run(stops, list(text))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert run(stops, pieces)[0] == expected
