"""The network against logits of two public implementations (an MLX port and a PyTorch training port).

Both ran once in fp32, each with its own code for everything from patches to logits, on the checkpoint that
`write_tiny(seed=7)` makes with the fields below (matrices widened from bfloat16, values unchanged). tests/data/
external_goldens.npz holds no weights: per prompt P the inputs `P/ids` (0 at image rows), `P/kinds`, `P/grids`,
`P/patches` (bits of bfloat16), `P/offsets`, `P/spans`, the positions `P/rows` (every fifth, the last, and those around
the borders of images) and `P/first/logits`, `P/second/logits` of these rows. The prompts are text, one image, an image
first and last, two and three images, adjacent images, a span far wider than the window, and 330 tokens with two images.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from network_helpers import PATCH_VALUES, Prompt, TinyModel, batch_of, logits_of
from safetensors.torch import load_file

from deepspan.core.media import ImageSpan

GOLDENS = Path(__file__).parents[1] / "data" / "external_goldens.npz"
TOLERANCE = 5e-5  # absolute; logits reach 5, the two implementations differ from each other by up to 4e-6
SEED = 7
FIELDS = {
    "vocab_size": 96,
    "sliding_window": 8,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 0,
    "vision_max_n_token": 64,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
PROMPTS = (
    "text60 one_image two_images adjacent image_first long330 wide_span two_images_short image_last three_images "
    "adjacent_short"
).split()


def weights_digest(folder: Path) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.double() if tensor.is_floating_point() else tensor
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def model(tiny_models) -> TinyModel:
    return tiny_models(seed=SEED, **FIELDS)


def golden_prompt(goldens: dict[str, np.ndarray], name: str) -> Prompt:
    """The inputs as the implementations saw them: layout and spans are theirs, too."""
    bits = goldens[f"{name}/patches"].astype(np.uint32) << 16
    patches = bits.view(np.float32).reshape(-1, PATCH_VALUES)
    grids = goldens[f"{name}/grids"].astype(int).tolist()
    ends = np.cumsum([rows * cols for rows, cols in grids]).astype(int).tolist()
    starts = [0, *ends][: len(ends)]
    places = zip(goldens[f"{name}/offsets"].tolist(), goldens[f"{name}/spans"].tolist(), strict=True)
    return Prompt(
        ids=goldens[f"{name}/ids"].astype(np.int64),
        kinds=goldens[f"{name}/kinds"],
        spans=tuple(ImageSpan(offset=offset, first=first, last=last) for offset, (first, last) in places),
        images=tuple((patches[a:b], *grid) for a, b, grid in zip(starts, ends, grids, strict=True)),
    )


def test_regenerated_checkpoint_is_the_one_the_goldens_were_made_with(goldens, model):
    stored = json.loads(str(goldens["config"]))
    changed = {name: value for name, value in stored.items() if model.raw.get(name) != value}
    assert not changed, f"write_tiny now gives other values for {sorted(changed)}: the goldens no longer apply"
    assert weights_digest(model.folder) == str(goldens["weights_digest"]), (
        "write_tiny no longer gives the weights the goldens were made with: either its rules changed or numpy's random "
        "stream did. The network may be right; make the goldens anew, or pin what changed."
    )


def test_goldens_list_every_prompt_of_this_file(goldens):
    assert goldens["prompts"].tolist() == PROMPTS


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_prompt_equal_both_public_implementations(goldens, model, name):
    prompt = golden_prompt(goldens, name)
    logits = logits_of(model.network, batch_of(model, [prompt]))
    found = logits[goldens[f"{name}/rows"].astype(int)]
    for implementation in ("first", "second"):
        expected = goldens[f"{name}/{implementation}/logits"]
        assert found.shape == expected.shape
        assert expected.std() > 0.5
        assert np.abs(found - expected).max() < TOLERANCE, implementation
