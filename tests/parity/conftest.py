"""Tiny checkpoints for the parity tests, each written and opened once per session."""

from collections.abc import Callable
from typing import Any

import pytest
from network_helpers import SMALL, SMALL_IMAGES, TinyModel, open_model

from deepspan.weights.tiny import write_tiny

TinyModels = Callable[..., TinyModel]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_models(ratios=..., vision=..., seed=..., **fields of config.json)` -> the opened checkpoint."""
    made: dict[str, TinyModel] = {}

    def get(
        *, ratios: tuple[int, ...] = (0, 4, 128, 4), vision: bool = True, seed: int = 0, **fields: Any
    ) -> TinyModel:
        overrides = SMALL | (SMALL_IMAGES if vision else {}) | fields
        key = repr((ratios, vision, seed, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny")
            made[key] = open_model(write_tiny(folder, ratios=ratios, vision=vision, seed=seed, overrides=overrides))
        return made[key]

    return get
