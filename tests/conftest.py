"""Settings for all tests, and tiny checkpoints, each written and opened once per session."""

import os
from typing import Any

import pytest

# Test models are so small that a second thread only waits for the first; on a busy machine it makes tests ten times
# slower. Set before torch is imported, which the torch-free tests never do.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tiny_models(ratios=, vision=, seed=, draft_stages=, **fields of config.json)` -> the opened checkpoint."""
    from network_helpers import SMALL, SMALL_IMAGES, TinyModel, open_model

    from deepspan.weights.tiny import write_tiny

    made: dict[str, TinyModel] = {}

    def get(
        *,
        ratios: tuple[int, ...] = (0, 4, 128, 4),
        vision: bool = True,
        seed: int = 0,
        draft_stages: int = 0,
        **fields: Any,
    ) -> TinyModel:
        overrides = SMALL | (SMALL_IMAGES if vision else {}) | fields
        key = repr((ratios, vision, seed, draft_stages, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny")
            options: dict[str, Any] = {"vision": vision, "seed": seed, "draft_stages": draft_stages}
            made[key] = open_model(write_tiny(folder, ratios=ratios, overrides=overrides, **options))
        return made[key]

    return get
