"""The network in fp32 against the float64 oracle: logits, streams after every layer, image features.

Every case also proves that it can be decided: no router or indexer choice of the oracle is a near tie, so a difference
is never an excuse.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from network_helpers import (
    NEAR_TIE,
    Part,
    Prompt,
    TinyModel,
    batch_of,
    encode,
    logits_of,
    make_prompt,
    relative_error,
    run_oracle,
    smallest_margin,
)

TOLERANCE = 1e-5  # of the largest value

TEXT = [300]
ONE_IMAGE = [10, (12, 15), 20]
TWO_IMAGES = [18, (13, 10), 9, (3, 4), 60]  # grids that are not whole cells, too
ADJACENT = [10, (12, 15), (13, 10), 110]
IMAGE_FIRST = [(12, 15), 40]
IMAGE_LAST = [41, (7, 8)]
THREE_IMAGES = [2, (6, 6), (1, 1), 30, (9, 5), 40]
WIDE_SPAN = [24, (30, 36), 40]  # 10 x 12 cells: a span far longer than the window


@dataclass(frozen=True)
class Case:
    parts: list[Part]
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    fields: dict[str, Any] = field(default_factory=dict)
    vision: bool = True
    seed: int = 0


CASES = {
    "text": Case(TEXT),
    "text_only_model": Case(TEXT, vision=False),
    "text_scaled_ratios": Case(TEXT, ratios=(0, 4, 16, 4)),
    "text_compressed_first": Case(TEXT, ratios=(4, 0, 16, 128)),
    "text_all_hash": Case([120], fields={"num_hash_layers": 4}),
    "text_no_hash": Case([120], fields={"num_hash_layers": 0}),
    "text_clamped": Case([200], fields={"swiglu_limit": 0.3}),
    "text_released_eps": Case([60], fields={"rms_norm_eps": 1e-20}),
    "text_shorter_than_group": Case([3]),
    "text_more_entries_than_topk": Case([400], ratios=(4, 4), fields={"index_topk": 5}),
    "one_image": Case(ONE_IMAGE),
    "one_image_clamped": Case(ONE_IMAGE, fields={"swiglu_limit": 0.3}),
    "one_image_all_hash": Case(ONE_IMAGE, fields={"num_hash_layers": 4}),
    "two_images": Case(TWO_IMAGES),
    "two_images_scaled_ratios": Case(TWO_IMAGES, ratios=(4, 0, 16, 4)),
    "adjacent_images": Case(ADJACENT),
    "adjacent_images_scaled_ratios": Case(ADJACENT, ratios=(0, 4, 16, 4)),
    "image_first": Case(IMAGE_FIRST),
    "image_last": Case(IMAGE_LAST),
    "three_images": Case(THREE_IMAGES, ratios=(0, 4, 16, 4)),
    "span_wider_than_window": Case(WIDE_SPAN),
    "span_wider_than_window_scaled_ratios": Case(WIDE_SPAN, ratios=(4, 16, 0, 4)),
    "released_window_and_largest_square": Case(
        [130, (54, 54), 40], fields={"sliding_window": 128, "index_topk": 32}, seed=2
    ),
}
WITH_IMAGES = [name for name, case in CASES.items() if any(isinstance(part, tuple) for part in case.parts)]


@dataclass(frozen=True)
class Solved:
    case: Case
    model: TinyModel
    prompt: Prompt
    expected: dict[str, Any]


@pytest.fixture(scope="session")
def solve(tiny_models):
    """Oracle runs by case name, each computed once."""
    solved: dict[str, Solved] = {}

    def get(name: str) -> Solved:
        if name not in solved:
            case = CASES[name]
            model = tiny_models(ratios=case.ratios, vision=case.vision, seed=case.seed, **case.fields)
            prompt = make_prompt(case.parts, model.config.vocab_size, seed=case.seed)
            solved[name] = Solved(case, model, prompt, run_oracle(model, prompt))
        return solved[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_network_logits_and_streams_equal_oracle(solve, name):
    s = solve(name)
    assert smallest_margin(s.expected) > NEAR_TIE
    with torch.no_grad():
        found = s.model.network(batch_of(s.model, [s.prompt]), stream_taps=range(len(s.case.ratios)))
    assert relative_error(found.logits.numpy(), s.expected["logits"]) < TOLERANCE
    assert s.expected["logits"].std() > 0.3  # not a comparison of zeros
    for layer, expected in enumerate(s.expected["streams"]):
        assert relative_error(found.streams[layer].numpy(), expected) < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_image_features_in_emission_order_equal_oracle(solve, name):
    s = solve(name)
    with torch.no_grad():
        found = encode(s.model.network, s.prompt).numpy()
    assert relative_error(found, s.expected["features"]) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["text", "text_more_entries_than_topk", "adjacent_images", "released_window_and_largest_square"]
)
def test_oracle_case_makes_indexer_choose(solve, name):
    """The choice is real: fewer than visible, and not simply the newest or the oldest entries."""
    s = solve(name)
    topk = s.model.config.index_topk
    for selected in (layer for layer in s.expected["selected"] if layer is not None):
        chosen, num_visible = selected[-1], (len(s.prompt)) // 4
        assert len(chosen) == topk < num_visible
        assert chosen != set(range(num_visible - topk, num_visible))
        assert chosen != set(range(topk))


def test_clamped_case_makes_clamp_bind(solve):
    """Without the clamp the same prompt gives other logits, so that the parity above proves the clamp."""
    s = solve("text_clamped")
    unclamped = run_oracle(
        TinyModel(
            folder=s.model.folder,
            raw=s.model.raw | {"swiglu_limit": 0.0},
            weights=s.model.weights,
            config=s.model.config,
            network=s.model.network,
        ),
        s.prompt,
    )
    assert relative_error(unclamped["logits"], s.expected["logits"]) > 1e-2


@pytest.mark.parametrize("ratios", [(0, 4, 128, 4), (4, 0, 16, 4)])
def test_packed_batch_equals_oracle_sequence_by_sequence(tiny_models, ratios):
    """Sequences of any length and alignment, some shorter than a group, share a batch and never see each other."""
    model = tiny_models(ratios=ratios)
    parts: list[list[Part]] = [[3], [10, (12, 15), 20], [133], [1], [(6, 6), (6, 9), 5], [64]]
    prompts = [make_prompt(p, model.config.vocab_size, seed) for seed, p in enumerate(parts)]
    logits = logits_of(model.network, batch_of(model, prompts))
    start = 0
    for prompt in prompts:
        expected = run_oracle(model, prompt)
        assert smallest_margin(expected) > NEAR_TIE
        assert relative_error(logits[start : start + len(prompt)], expected["logits"]) < TOLERANCE
        start += len(prompt)
    assert start == len(logits)


def test_image_encoder_result_is_independent_of_other_images(tiny_models):
    model = tiny_models()
    both = make_prompt([(12, 15), (13, 10)], model.config.vocab_size, seed=1)
    alone = Prompt(ids=both.ids, kinds=both.kinds, spans=both.spans[1:], images=both.images[1:])
    with torch.no_grad():
        together, second = encode(model.network, both).numpy(), encode(model.network, alone).numpy()
    assert np.abs(together[-len(second) :] - second).max() < 1e-5
