"""Special ids: exact entries only, consecutive spans, the one trusted public spelling, boundaries of the sentinels."""

from collections import defaultdict

import pytest

from deepspan.core.media import TokenKind
from deepspan.errors import ConfigError
from deepspan.text import special
from deepspan.text.special import SpecialIds

BASE = 129257


def _vocab() -> dict[str, int]:
    """Ids as in the release, as far as tests look at them."""
    vocab = {string: 128800 + n for n, string in enumerate(special.GRAMMAR)}
    vocab |= {special.BOS: 0, special.EOS: 1, special.PAD: 2, special.IMAGE: 129264, "a": 67}
    return vocab | {string: BASE + n for n, string in enumerate(special.SPANS)}


def test_spans_of_release_are_spelled_with_ascii_bars():
    assert special.SPANS[0] == "<|place_holder_mm_span_0431|>"
    assert special.SPANS[-1] == "<|place_holder_mm_span_0435|>"
    assert special.TASKS["read_url"] == "<｜read_url｜>"


def test_resolve_release_vocabulary_gives_its_ids():
    ids = SpecialIds.resolve(_vocab(), vision=True)
    assert (ids.bos, ids.eos, ids.pad, ids.sentinel_base, ids.image) == (0, 1, 2, BASE, 129264)
    assert ids.hidden == {0, 1, 2, ids.user, ids.assistant, *range(BASE, BASE + 5), 129264}
    assert ids.hidden.isdisjoint({ids.think_open, ids.think_close, ids.dsml})


@pytest.mark.parametrize(
    ("token_id", "kind"),
    [
        (BASE - 1, TokenKind.TEXT),
        (BASE, TokenKind.START),
        (BASE + 1, TokenKind.PAD),
        (BASE + 2, TokenKind.IMAGE),
        (BASE + 3, TokenKind.NEWLINE),
        (BASE + 4, TokenKind.END),
        (BASE + 5, TokenKind.TEXT),
        (129264, TokenKind.TEXT),
        (0, TokenKind.TEXT),
    ],
)
def test_kind_of_boundary_ids_is_text_outside_the_five(token_id, kind):
    ids = SpecialIds.resolve(_vocab(), vision=True)
    assert ids.kind_of(token_id) is kind
    assert ids.is_sentinel(token_id) == (kind is not TokenKind.TEXT)


@pytest.mark.parametrize("string", [*special.GRAMMAR, *special.SPANS, special.IMAGE])
def test_resolve_without_one_token_is_refused_by_name(string):
    vocab = _vocab()
    del vocab[string]
    with pytest.raises(ConfigError) as caught:
        SpecialIds.resolve(vocab, vision=True)
    assert string in str(caught.value)


def test_resolve_with_unknown_token_fallback_is_refused():
    vocab = _vocab()
    del vocab[special.IMAGE]
    with pytest.raises(ConfigError, match="deepseek_image"):
        SpecialIds.resolve(defaultdict(int, vocab), vision=True)  # answers 0 for any string


def test_resolve_with_fallback_id_written_in_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="share the id 0"):
        SpecialIds.resolve(_vocab() | {special.IMAGE: 0}, vision=True)


@pytest.mark.parametrize(("public_id", "is_served"), [(129264, True), (129263, False), (0, False)])
def test_resolve_public_spelling_of_image_is_trusted_at_one_id(public_id, is_served):
    vocab = _vocab()
    del vocab[special.IMAGE]
    vocab[special.PUBLIC_IMAGE] = public_id
    if is_served:
        ids = SpecialIds.resolve(vocab, vision=True)
        assert ids.image == 129264
        assert 129264 in ids.hidden
        return
    with pytest.raises(ConfigError, match="deepseek_image"):
        SpecialIds.resolve(vocab, vision=True)


def test_resolve_with_a_gap_between_spans_is_refused():
    with pytest.raises(ConfigError, match="_0433"):
        SpecialIds.resolve(_vocab() | {special.SPANS[2]: 200000}, vision=True)


def test_resolve_without_vision_needs_no_image_tokens_and_knows_no_sentinels():
    vocab = _vocab()
    del vocab[special.IMAGE]
    ids = SpecialIds.resolve(vocab, vision=False)
    assert (ids.sentinel_base, ids.image) == (None, None)
    assert ids.kind_of(BASE) is TokenKind.TEXT
    assert not ids.is_sentinel(BASE)
    assert BASE in ids.hidden  # still never text
