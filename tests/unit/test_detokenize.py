"""Incremental detokeniser: pieces joined equal the whole, however bytes and ids are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspan.errors import InputError
from deepspan.text.detokenize import Detokenizer
from deepspan.text.segments import Text
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer

NUM_IDS = 280  # of the tiny tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    assert write_tiny_tokenizer(folder) == NUM_IDS
    return Tokenizer(folder, vision=True)


def _ids(tokenizer, text):
    return tokenizer.encode([Text(text=text)])


def _pieces(tokenizer, ids, cuts):
    detokenizer = Detokenizer(tokenizer)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    pieces = [detokenizer.push(ids[low:high]) for low, high in pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@given(st.text(), st.lists(st.integers(0, 60), max_size=20))
def test_push_text_cut_anywhere_sums_to_the_text_without_broken_pieces(tokenizer, text, cuts):
    pieces = _pieces(tokenizer, _ids(tokenizer, text), cuts)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, NUM_IDS - 1), max_size=60), st.lists(st.integers(0, 60), max_size=20))
def test_push_any_ids_cut_anywhere_sums_to_decode(tokenizer, ids, cuts):
    assert "".join(_pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@given(st.binary(max_size=30))
def test_push_one_id_at_a_time_holds_back_at_most_three(tokenizer, raw):
    by_byte = {tokenizer.bytes_of(token_id): token_id for token_id in range(3, 259)}
    detokenizer, since = Detokenizer(tokenizer), 0
    for byte in raw:
        since = 0 if detokenizer.push([by_byte[bytes([byte])]]) else since + 1
        assert since <= 3


def test_push_split_character_waits_for_its_last_byte(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in _ids(tokenizer, "a🙂b")] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_push_hidden_id_inside_a_character_leaves_no_trace(tokenizer):
    first, second = _ids(tokenizer, "é")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([tokenizer.special.bos, first, tokenizer.special.user]) == ""
    assert detokenizer.push([second, tokenizer.special.eos]) == "é"


def test_finish_inside_a_character_gives_one_replacement_and_starts_afresh(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(_ids(tokenizer, "x🙂")[:-1]) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(_ids(tokenizer, "é")) == "é"


def test_push_think_tags_and_dsml_stay_text(tokenizer):
    own = tokenizer.special
    assert Detokenizer(tokenizer).push([own.think_open, own.think_close, own.dsml]) == "<think></think>｜DSML｜"


def test_push_unknown_id_is_refused_and_changes_nothing(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    first, second = _ids(tokenizer, "é")
    detokenizer.push([first])
    with pytest.raises(InputError, match="token id 280 "):
        detokenizer.push([second, NUM_IDS])
    assert detokenizer.push([second]) == "é"
