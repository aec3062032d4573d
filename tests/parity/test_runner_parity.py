"""From prepared images and requests to next-token logits: the runner against the oracle.

What the other parity tests do by hand (encode, emission order, batch) is done here by the runner itself.
"""

import numpy as np
import pytest
import torch
from network_helpers import TILE, Prompt, TinyModel, make_prompt, relative_error, run_oracle
from oracle import layout

from deepspan.core.media import PreparedImage
from deepspan.core.request import Request, SamplingParams
from deepspan.image.layout import image_block
from deepspan.runtime.runner import Runner
from deepspan.weights.load import load_model

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tiny_models) -> TinyModel:
    return tiny_models(ratios=(0, 4, 16, 4))


@pytest.fixture(scope="module")
def runner(model) -> Runner:
    return Runner(load_model(model.folder, dtype=torch.float32), torch.device("cpu"))


def request_of(prompt: Prompt) -> Request:
    images = [
        PreparedImage(
            patches=patches,
            grid_rows=rows,
            grid_cols=cols,
            block=image_block(-(-rows // TILE), -(-cols // TILE)),
            digest="",
        )
        for patches, rows, cols in prompt.images
    ]
    return Request(
        token_ids=prompt.ids, kinds=prompt.kinds, spans=prompt.spans, images=tuple(images), params=SamplingParams()
    )


def continued(prompt: Prompt, generated: list[int]) -> Prompt:
    return Prompt(
        ids=np.concatenate((prompt.ids, np.asarray(generated, dtype=np.int64))),
        kinds=np.concatenate((prompt.kinds, np.full(len(generated), layout.TEXT, dtype=np.int8))),
        spans=prompt.spans,
        images=prompt.images,
    )


def test_encoded_images_of_request_are_oracle_features_in_emission_order(model, runner):
    prompt = make_prompt([4, (12, 15), 3, (13, 10), 5], model.config.vocab_size, seed=6)
    found = runner.encode(request_of(prompt).images).numpy()
    assert relative_error(found, run_oracle(model, prompt)["features"]) < TOLERANCE


def test_encode_without_images_is_none(runner):
    assert runner.encode(()) is None


def test_next_logits_of_mixed_requests_equal_oracle_of_each(model, runner):
    """Text, images, and an image at the very end, each some generated tokens further."""
    parts = [[23], [4, (12, 15), 3, (13, 10), 5], [9, (7, 8)]]
    prompts = [make_prompt(part, model.config.vocab_size, seed) for seed, part in enumerate(parts)]
    generated = [[7, 8, 9], [], [11]]
    requests = [request_of(prompt) for prompt in prompts]
    features = [runner.encode(request.images) for request in requests]
    found = runner.next_logits(requests, generated, features).numpy()
    for row, prompt, tokens in zip(found, prompts, generated, strict=True):
        expected = run_oracle(model, continued(prompt, tokens))["logits"]
        assert relative_error(row, expected[-1]) < TOLERANCE
