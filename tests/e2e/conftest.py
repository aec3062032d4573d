"""Tiny checkpoints and loaded models, made once for all end-to-end tests."""

import pytest
from network_helpers import PADDED_VOCAB

from deepspan import LLM
from deepspan.weights.tiny import write_tiny

SMALL = {"vision_patch_size": 2, "vision_max_n_token": 64, "vision_min_pixels": 144, "vocab_size": PADDED_VOCAB}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Vision, all kinds of layers, sharded, small images."""
    folder = tmp_path_factory.mktemp("tiny") / "vision"
    return write_tiny(folder, ratios=(0, 4, 16, 4), num_shards=2, seed=3, overrides=SMALL)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory):
    """As `model_folder`, with three draft stages."""
    folder = tmp_path_factory.mktemp("tiny") / "drafts"
    return write_tiny(folder, ratios=(0, 4, 16, 4), seed=3, draft_stages=3, overrides=SMALL)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "text", ratios=(0, 4), vision=False)


@pytest.fixture(scope="session")
def llm(model_folder):
    return LLM(model_folder, device="cpu")
