"""The network is differentiable: every parameter that takes part gets a gradient, and it is the one of the oracle.

Left out by design: the indexer and the biases of the routers only make choices, so no gradient reaches them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from network_helpers import Prompt, TinyModel, encode, make_prompt, run_oracle, sequence

from deepspan.runtime.batch_builder import build_batch

PARTS = [9, (6, 6), 30, (7, 5), 40]  # odd grids: pads and newlines take part


def is_choice_only(name: str) -> bool:
    return ".indexer." in name or name.endswith((".gate.bias", ".gate.bias_vl"))


@pytest.fixture(scope="module")
def model(tiny_models) -> TinyModel:
    return tiny_models(ratios=(0, 4, 16, 4), index_topk=8, seed=2)


@pytest.fixture(scope="module")
def prompt(model) -> Prompt:
    return make_prompt(PARTS, model.config.vocab_size, seed=2)


@pytest.fixture(scope="module")
def direction(model, prompt) -> np.ndarray:
    """The loss is the sum of logits times this."""
    shape = (len(prompt), model.config.vocab_size)
    return np.random.default_rng(0).standard_normal(shape) / np.sqrt(shape[0] * shape[1])


@pytest.fixture(scope="module")
def gradients(model, prompt, direction) -> dict[str, torch.Tensor | None]:
    network = model.with_ops().requires_grad_(True)
    batch = build_batch([sequence(prompt, encode(network, prompt))], model.config, "cpu")
    (network(batch).logits * torch.from_numpy(direction).float()).sum().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def test_backward_reaches_every_parameter_but_those_that_only_choose(gradients):
    without = {name for name, gradient in gradients.items() if gradient is None}
    assert without == {name for name in gradients if is_choice_only(name)}


def test_backward_gradients_are_finite_and_not_all_zero(gradients):
    for name, gradient in gradients.items():
        if gradient is not None:
            assert bool(gradient.isfinite().all()), name
            assert bool((gradient != 0).any()), name


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "hc_head_fn",
        "layers.0.attn.attn_sink",
        "layers.0.ffn.gate.weight",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.compressor.wgate.weight",
        "layers.1.hc_attn_base",
        "layers.2.attn.compressor.norm.weight",
        "layers.2.attn.wq_b.weight",
        "layers.3.ffn.shared_experts.w1.weight",
        "layers.3.hc_ffn_scale",
        "image_pad",
        "aligner.w1.weight",
        "vision.blocks.0.attn.wqkv.bias",
        "vision.patch_embed.proj.weight",
    ],
)
def test_gradient_along_random_direction_equals_difference_of_oracle(model, prompt, direction, gradients, name):
    """Central difference in float64, a step so small that no choice flips."""
    step = np.random.default_rng(1).standard_normal(model.weights[name].shape)
    step /= np.linalg.norm(step)
    found = float((gradients[name].double().numpy() * step).sum())

    def loss(scale: float) -> float:
        changed: dict[str, Any] = model.weights | {name: model.weights[name] + scale * step}
        return float((run_oracle(replace(model, weights=changed), prompt)["logits"] * direction).sum())

    size = 1e-6
    expected = (loss(size) - loss(-size)) / (2 * size)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
