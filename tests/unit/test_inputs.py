"""Requests from what a user gives: expansion of image slots, order, refusals; no torch."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from released import flash_vision

from deepspan.config.model import parse_model_config
from deepspan.core.media import ImageSpan, PreparedImage, TokenKind
from deepspan.core.sampling import SamplingParams
from deepspan.engine.inputs import InputBuilder, expand_images
from deepspan.errors import ContextError, ImageError, InputError
from deepspan.image.decode import ImageLimits
from deepspan.image.layout import image_block
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer

CHAT = ChatOptions(effort="none")
PARAMS = SamplingParams(max_tokens=4)
TINY_IMAGES = {"vision_patch_size": 2, "vision_max_n_token": 64, "vision_min_pixels": 144}
START, PAD, IMAGE, NEWLINE, END, TEXT = 0, 1, 2, 3, 4, -1


@pytest.fixture(scope="module")
def config(tokenizer):
    sizes = {"vocab_size": tokenizer.vocab_size, "dspark_noise_token_id": 0, "max_position_embeddings": 200}
    return parse_model_config(flash_vision() | sizes | TINY_IMAGES)


@pytest.fixture(scope="module")
def builder(config, tokenizer):
    return InputBuilder(config, tokenizer)


def _grid(num_rows, num_cols):
    """An image of that many cells; its pixels do not matter here."""
    return PreparedImage(
        patches=np.zeros((1, 12), dtype=np.float32),
        grid_rows=3 * num_rows,
        grid_cols=3 * num_cols,
        block=image_block(num_rows, num_cols),
        digest="",
    )


def _picture(width=12, height=12, value=0):
    return Image.new("RGB", (width, height), (value, value, value))


def _expand(tokenizer, prompt, images):
    """`prompt`: letters are text tokens, `#` an image slot."""
    ids = [tokenizer.special.image if letter == "#" else ord(letter) for letter in prompt]
    return expand_images(ids, images, tokenizer)


def _user(*parts):
    return [{"role": "user", "content": list(parts)}]


def _image(source):
    return {"type": "image", "image": source}


# --- expansion


@pytest.mark.parametrize(
    ("grid", "start", "codes", "rows"),
    [
        ((2, 2), 0, [1, 1, 1, 0, 2, 2, 2, 2, 3, 3, 1, 1, 4], [0, 2, 1, 3]),
        ((2, 2), 3, [0, 2, 2, 2, 2, 3, 3, 1, 1, 4], [0, 2, 1, 3]),
        ((3, 2), 2, [1, 0, 2, 2, 2, 2, 3, 3, 2, 1, 2, 1, 3, 1, 4], [0, 2, 1, 3, 4, 5]),
        ((1, 1), 0, [1, 1, 1, 0, 2, 1, 3, 1, 4], [0]),
    ],
)
def test_expansion_of_one_image_equals_known_codes(tokenizer, grid, start, codes, rows):
    image = _grid(*grid)
    ids, kinds, spans = _expand(tokenizer, "x" * start + "#yz", [image])
    assert kinds.tolist() == [TEXT] * start + codes + [TEXT] * 2
    sentinels = [tokenizer.special.sentinel_base + code for code in codes]
    assert ids.tolist() == [ord("x")] * start + sentinels + [ord("y"), ord("z")]
    assert ids.dtype == np.int64
    assert kinds.dtype == np.int8
    first = start + codes.index(START)
    assert spans == (ImageSpan(offset=start, first=first, last=start + len(codes) - 1),)
    assert image.block.encoder_rows.tolist() == rows


@pytest.mark.parametrize("num_between", [0, 1, 2, 3, 4, 7])
def test_expansion_of_same_image_twice_aligns_both_on_the_expanded_prompt(tokenizer, num_between):
    image = _grid(7, 14)
    _, kinds, spans = _expand(tokenizer, "ab#" + "c" * num_between + "#d", [image, image])
    assert [span.last - span.first + 1 for span in spans] == [122, 122]
    assert [span.first % 4 for span in spans] == [3, 3]
    assert spans[0].offset == 2
    assert spans[1].offset == spans[0].last + 1 + num_between
    assert len(kinds) == spans[1].last + 2
    for span in spans:
        assert kinds[span.first : span.last + 1].tolist() == image.block.kinds.tolist()
        assert (kinds[span.offset : span.first] == PAD).all()


def test_expansion_of_same_image_after_each_text_length_has_every_lead(tokenizer):
    image = _grid(7, 14)
    leads = []
    for num_between in range(1, 5):
        *_, spans = _expand(tokenizer, "#" + "c" * num_between + "#", [image, image])
        leads.append(spans[1].last - spans[1].offset + 1)
    assert sorted(leads) == [122, 123, 124, 125]


grids = st.tuples(st.integers(1, 5), st.integers(1, 5))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), grids), max_size=4), st.integers(0, 3))
def test_expansion_of_any_prompt_keeps_every_text_token_and_aligns_every_span(tokenizer, parts, num_after):
    prompt = "".join("t" * num_before + "#" for num_before, _ in parts) + "t" * (num_after + 1)
    images = [_grid(*grid) for _, grid in parts]
    ids, kinds, spans = _expand(tokenizer, prompt, images)
    assert len(ids) == len(kinds)
    assert np.count_nonzero(kinds == TEXT) == prompt.count("t")
    assert len(spans) == len(images)
    assert (np.where(kinds == TEXT, ord("t"), tokenizer.special.sentinel_base + kinds.astype(int)) == ids).all()
    for span, image in zip(spans, images, strict=True):
        assert (span.first % 4, span.last % 4, span.first - span.offset <= 3) == (3, 0, True)
        assert (kinds[span.first : span.last + 1] == image.block.kinds).all()


def test_expansion_of_text_changes_nothing(tokenizer):
    ids, kinds, spans = _expand(tokenizer, "abc", [])
    assert (ids.tolist(), kinds.tolist(), spans) == ([97, 98, 99], [TEXT] * 3, ())


@pytest.mark.parametrize(("prompt", "num_images"), [("a#b", 0), ("ab", 1), ("#", 2), ("##", 1), ("##", 3)])
def test_expansion_with_other_number_of_images_is_refused_by_both_numbers(tokenizer, prompt, num_images):
    with pytest.raises(InputError, match=f"{prompt.count('#')} image slots and {num_images} images"):
        _expand(tokenizer, prompt, [_grid(1, 1)] * num_images)


def test_expansion_of_nothing_is_refused(tokenizer):
    with pytest.raises(InputError, match="the prompt is empty"):
        _expand(tokenizer, "", [])


# --- chat messages


def test_request_from_messages_keeps_the_order_of_parts(builder, tokenizer):
    sources = [_picture(12, 12), _picture(24, 12)]
    request = builder.from_messages(_user("A", _image(sources[0]), "B", _image(sources[1]), "C"), CHAT, PARAMS)
    text = tokenizer.decode(request.token_ids.tolist(), keep_special=True)
    first, second = request.spans
    assert "A" in tokenizer.decode(request.token_ids[: first.offset].tolist())
    assert tokenizer.decode(request.token_ids[first.last + 1 : second.offset].tolist()) == "\n\nB\n\n"
    assert tokenizer.decode(request.token_ids[second.last + 1 :].tolist(), keep_special=True).startswith("\n\nC")
    assert text.index("A") < text.index("B") < text.index("C")
    widths = [image.grid_cols for image in request.images]
    assert widths == sorted(widths)
    assert widths[0] < widths[1]


def test_request_from_messages_counts_adjacent_images(builder):
    request = builder.from_messages(_user(_image(_picture()), _image(_picture()), "?"), CHAT, PARAMS)
    assert len(request.spans) == len(request.images) == 2
    num_rows = sum(len(image.block.encoder_rows) for image in request.images)
    assert np.count_nonzero(request.kinds == TokenKind.IMAGE) == num_rows
    assert request.params is PARAMS


def test_request_from_messages_accepts_path_bytes_and_pillow_alike(builder, tmp_path):
    stream = BytesIO()
    _picture(20, 16, value=90).save(stream, "PNG")
    (tmp_path / "x.png").write_bytes(stream.getvalue())
    sources = (tmp_path / "x.png", stream.getvalue(), _picture(20, 16, value=90))
    requests = [builder.from_messages(_user(_image(source)), CHAT, PARAMS) for source in sources]
    assert len({request.images[0].digest for request in requests}) == 1
    assert all((request.token_ids == requests[0].token_ids).all() for request in requests)


def test_request_from_messages_with_a_written_placeholder_is_text(builder):
    request = builder.from_messages(_user("<｜deepseek_image｜><|place_holder_mm_span_0433|>"), CHAT, PARAMS)
    assert request.spans == ()
    assert (request.kinds == TEXT).all()


@pytest.mark.parametrize(
    ("source", "kind"), [("x.png", "str"), ("https://example.com/x.png", "str"), (3, "int"), ([b"x"], "list")]
)
def test_request_with_image_of_wrong_type_is_refused_by_part(builder, source, kind):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, *_user("x", _image(source))]
    with pytest.raises(InputError, match=rf"messages\[2\]\.content\[1\].*found {kind}"):
        builder.from_messages(messages, CHAT, PARAMS)


def test_request_with_image_address_is_not_fetched(builder):
    part = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    with pytest.raises(InputError, match=r"messages\[0\]\.content\[0\].*addresses are not fetched"):
        builder.from_messages(_user(part), CHAT, PARAMS)


@pytest.mark.parametrize("source", [b"", b"not a picture"])
def test_request_with_broken_image_is_refused_by_part(builder, source):
    with pytest.raises(ImageError, match=r"^messages\[0\]\.content\[1\]: the image is"):
        builder.from_messages(_user("x", _image(source)), CHAT, PARAMS)


def test_request_with_image_over_the_limit_of_the_builder_is_refused(config, tokenizer):
    builder = InputBuilder(config, tokenizer, limits=ImageLimits(max_side=10))
    with pytest.raises(ImageError, match=r"content\[0\].*12 x 12"):
        builder.from_messages(_user(_image(_picture())), CHAT, PARAMS)


def test_request_with_image_mode_is_prepared_in_that_mode(config, tokenizer):
    clear = Image.new("RGBA", (12, 12), (0, 0, 0, 0))
    modes = {mode: InputBuilder(config, tokenizer, image_mode=mode) for mode in ("serving", "reference")}
    white, black = (b.from_messages(_user(_image(clear)), CHAT, PARAMS).images[0].patches for b in modes.values())
    assert (white == 1).all()
    assert (black == -1).all()


def test_request_with_image_for_a_text_model_is_refused_by_part(tokenizer_folder, config):
    text_only = parse_model_config(
        flash_vision() | {"vocab_size": config.vocab_size, "dspark_noise_token_id": 0, "vision_n_layers": 0}
    )
    builder = InputBuilder(text_only, Tokenizer(tokenizer_folder, vision=False))
    with pytest.raises(InputError, match=r"messages\[0\]\.content\[0\].*no vision"):
        builder.from_messages(_user(_image(_picture())), CHAT, PARAMS)
    assert builder.from_messages(_user("hi"), CHAT, PARAMS).images == ()


# --- raw prompts


def test_request_from_text_adds_nothing(builder, tokenizer):
    request = builder.from_prompt("<｜User｜>hi", PARAMS)
    assert request.token_ids.tolist() == [tokenizer.special.user, *tokenizer.encode_raw("hi")]
    assert (request.kinds == TEXT).all()


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.uint8)])
def test_request_from_ids_takes_any_sequence_of_integers(builder, ids):
    assert builder.from_prompt(ids, PARAMS).token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("token_id", [-1, 10**6, 1.0, "a", None, True, np.float32(1)])
def test_request_from_ids_outside_the_vocabulary_is_refused_by_id(builder, token_id):
    with pytest.raises(InputError, match="outside the vocabulary"):
        builder.from_prompt([5, token_id], PARAMS)


def test_request_from_ids_of_images_is_refused_by_id(builder, tokenizer):
    special = tokenizer.special
    for token_id in (special.image, *range(special.sentinel_base, special.sentinel_base + 5)):
        with pytest.raises(InputError, match=f"token id {token_id} stands for an image"):
            builder.from_prompt([5, token_id], PARAMS)
    with pytest.raises(InputError, match="cannot be written as text"):
        builder.from_prompt("<|place_holder_mm_span_0433|>", PARAMS)


@pytest.mark.parametrize("prompt", ["", [], np.array([], dtype=np.int64)])
def test_request_from_an_empty_prompt_is_refused(builder, prompt):
    with pytest.raises(InputError, match="the prompt is empty"):
        builder.from_prompt(prompt, PARAMS)


@pytest.mark.parametrize("prompt", [5, None, b"abc", {5: 6}, {5}])
def test_request_from_a_prompt_of_wrong_type_is_refused(builder, prompt):
    with pytest.raises(InputError, match="a prompt must be text or a list of token ids"):
        builder.from_prompt(prompt, PARAMS)


# --- context length


@pytest.mark.parametrize(("num_tokens", "fits"), [(196, True), (197, False)])
def test_request_must_leave_room_for_its_new_tokens(builder, num_tokens, fits):
    ids = [5] * num_tokens
    if fits:
        assert len(builder.from_prompt(ids, PARAMS).token_ids) == num_tokens
    else:
        with pytest.raises(InputError, match="197 prompt tokens and max_tokens 4 are more than max_model_len 200"):
            builder.from_prompt(ids, PARAMS)


def test_request_counts_expanded_images_against_the_limit(builder):
    big = _picture(60, 60)
    builder.from_messages(_user(_image(big)), CHAT, PARAMS)
    with pytest.raises(InputError, match="prompt tokens and max_tokens"):
        builder.from_messages(_user(*[_image(big)] * 6), CHAT, PARAMS)


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [10**6]}, {"logit_bias": {10**6: 1.0}}, {"bad_words": [[1], [2, 10**6]]}]
)
def test_sampling_parameters_with_ids_outside_the_vocabulary_are_refused(builder, params):
    with pytest.raises(InputError, match=f"{next(iter(params))}: token id 1000000 is outside the vocabulary"):
        builder.from_prompt("a", SamplingParams(**params))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(builder, tokenizer, monkeypatch):
    longest = 200 * tokenizer.longest_token
    monkeypatch.setattr(tokenizer, "encode", None)  # calling it would be a TypeError
    monkeypatch.setattr(tokenizer, "encode_raw", None)
    for make in (
        lambda text: builder.from_messages([{"role": "user", "content": text}], CHAT, PARAMS),
        lambda text: builder.from_prompt(text, PARAMS),
    ):
        with pytest.raises(ContextError, match="characters has more tokens than max_model_len 200"):
            make("x" * (longest + 1))


@pytest.mark.parametrize(("limit", "kept"), [(100, 100), (1000, 197)])
def test_max_tokens_is_cut_to_the_room_where_that_is_asked_for(builder, limit, kept):
    request = builder.from_prompt("abc", SamplingParams(max_tokens=limit, min_tokens=limit), fit=True)
    assert (request.params.max_tokens, request.params.min_tokens) == (kept, kept)


def test_prompt_that_leaves_no_room_is_refused_even_where_the_limit_is_cut(builder):
    with pytest.raises(ContextError, match="200 prompt tokens"):
        builder.from_prompt("x" * 200, SamplingParams(max_tokens=1), fit=True)
