"""Requests and sampling parameters: what is refused when they are built, and with which words."""

import numpy as np
import pytest

from deepspan.core.media import ImageSpan, PreparedImage
from deepspan.core.request import Request, check_spans
from deepspan.core.sampling import SamplingParams
from deepspan.errors import InputError
from deepspan.image.layout import image_block

KINDS = {"T": -1, "S": 0, "P": 1, "I": 2, "N": 3, "E": 4}


def _kinds(letters):
    return np.array([KINDS[letter] for letter in letters], dtype=np.int8)


def _span(offset, first, last):
    return ImageSpan(offset=offset, first=first, last=last)


def _image(num_rows=1, num_cols=1):
    return PreparedImage(
        patches=np.zeros((1, 12), dtype=np.float32),
        grid_rows=1,
        grid_cols=1,
        block=image_block(num_rows, num_cols),
        digest="",
    )


def _request(letters="TTTSIPNPE", **fields):
    kinds = _kinds(letters)
    arguments = {
        "token_ids": np.zeros(len(kinds), dtype=np.int64),
        "kinds": kinds,
        "spans": (_span(3, 3, 8),),
        "images": (_image(),),
        "params": SamplingParams(),
    }
    return Request(**arguments | fields)


# --- spans


@pytest.mark.parametrize(
    ("letters", "spans"),
    [
        ("TTT", ()),
        ("PPPSIPNPE", [(0, 3, 8)]),
        ("TTTSIPNPETT", [(3, 3, 8)]),
        ("PPPSIPNPEPPSIPNPE", [(0, 3, 8), (9, 11, 16)]),
        ("TTTSIPNPETTSIPNPE", [(3, 3, 8), (11, 11, 16)]),
    ],
)
def test_spans_that_fit_their_prompt_are_accepted(letters, spans):
    check_spans(tuple(_span(*span) for span in spans), _kinds(letters))


@pytest.mark.parametrize(
    ("letters", "spans", "message"),
    [
        ("TTTTTTTTTTTTT", [(5, 5, 9), (8, 8, 12)], "does not run from START to END"),
        ("SIIESIIE", [(0, 0, 3), (3, 4, 7)], r"\[4, 7\] at 3 overlaps the previous one or runs backwards"),
        ("SIIESIIE", [(4, 4, 7), (0, 0, 3)], r"\[0, 3\] at 0 overlaps the previous one or runs backwards"),
        ("SIIE", [(0, 0, 3), (0, 0, 3)], "overlaps the previous one"),
        ("SIIE", [(0, 3, 0)], "runs backwards"),
        ("SIIE", [(1, 0, 3)], "runs backwards"),
        ("SIIE", [(-1, 0, 3)], "runs backwards"),
        ("SIIE", [(0, 0, 4)], r"\[0, 4\] at 0 ends after the prompt of 4 tokens"),
        ("SIIN", [(0, 0, 3)], "does not run from START to END"),
        ("PIIE", [(0, 0, 3)], "does not run from START to END"),
        ("TSIIE", [(0, 1, 4)], "only lead pads may stand before START"),
        ("PTSIIE", [(0, 2, 5)], "only lead pads may stand before START"),
        ("SITE", [(0, 0, 3)], "holds text or another image's START or END"),
        ("SISE", [(0, 0, 3)], "holds text or another image's START or END"),
        ("SIEE", [(0, 0, 3)], "holds text or another image's START or END"),
        ("SIIETI", [(0, 0, 3)], "token 5 is an image token outside every image span"),
        ("PSIIE", [(1, 1, 4)], "token 0 is an image token outside every image span"),
        ("TTI", [], "token 2 is an image token outside every image span"),
    ],
)
def test_spans_that_do_not_fit_their_prompt_are_refused(letters, spans, message):
    with pytest.raises(InputError, match=message):
        check_spans(tuple(_span(*span) for span in spans), _kinds(letters))


# --- requests


def test_request_whose_parts_agree_is_built():
    request = _request()
    assert request.params == SamplingParams()
    with pytest.raises(AttributeError):
        request.spans = ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"letters": "", "spans": (), "images": ()}, "the prompt is empty"),
        ({"token_ids": np.zeros(4, dtype=np.int64)}, "4 token ids and 9 kinds"),
        ({"spans": ()}, "token 3 is an image token outside"),
        ({"images": ()}, "1 image placeholders and 0 images"),
        ({"images": (_image(), _image())}, "1 image placeholders and 2 images"),
        ({"letters": "TTT", "spans": ()}, "0 image placeholders and 1 images"),
        ({"images": (_image(1, 2),)}, "1 image tokens, its images have 2 encoder rows"),
    ],
)
def test_request_whose_parts_disagree_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        _request(**fields)


# --- sampling parameters


def test_sampling_parameters_by_default_are_greedy():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.0, 0, 1.0, 0.0, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e300},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"top_k": 10**9},
        {"max_tokens": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_sampling_parameter_at_its_bound_is_accepted(fields):
    assert SamplingParams(**fields) == SamplingParams(**fields)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 10**400, "1", None, True, [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_sampling_parameter_that_is_no_number_in_range_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name} must be a number from 0 to"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_p", 1.1), ("min_p", 1.1), ("top_p", 2)])
def test_sampling_parameter_above_one_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name} must be a number from 0 to 1, found {value}"):
        SamplingParams(**{name: value})


def test_sampling_parameter_top_p_of_zero_is_refused():
    with pytest.raises(InputError, match="top_p must be above 0"):
        SamplingParams(top_p=0)


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True])
@pytest.mark.parametrize("name", ["top_k", "max_tokens"])
def test_sampling_parameter_that_is_no_integer_in_range_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name} must be an integer of at least"):
        SamplingParams(**{name: value})


def test_sampling_parameter_max_tokens_of_zero_is_refused():
    with pytest.raises(InputError, match="max_tokens must be an integer of at least 1, found 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "7", True])
def test_sampling_parameter_seed_out_of_range_is_refused(value):
    with pytest.raises(InputError, match="seed must be an integer from 0 to"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_sampling_parameter_ignore_eos_that_is_no_switch_is_refused(value):
    with pytest.raises(InputError, match="ignore_eos must be true or false"):
        SamplingParams(ignore_eos=value)
