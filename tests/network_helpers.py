"""Prompts, checkpoints and batches for tests of the network.

The prompt is laid out by the oracle, never by the engine, so that a layout fault shows up as a difference. Checkpoints
come from `write_tiny`; their weights are also read as plain arrays, which is what the oracle takes.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
from oracle import layout
from safetensors.torch import load_file

from deepspan.config.model import ModelConfig
from deepspan.core.media import ImageSpan
from deepspan.image.layout import image_block
from deepspan.model.batch import ForwardBatch
from deepspan.model.drafter import DSpark
from deepspan.model.network import DeepseekV4
from deepspan.ops.registry import OpTable, reference_ops
from deepspan.runtime.batch_builder import SequenceInput, build_batch
from deepspan.weights.load import load_model
from deepspan.weights.table import DraftKind

TILE = 3  # patches per side of an image cell
PATCH_VALUES = 12  # 3 channels of 2 x 2 pixels
PADDED_VOCAB = 300  # rows beyond the tokenizer's, as released models have
NEAR_TIE = 1e-5  # a choice decided by less than this may fall either way in fp32
SMALL = {"sliding_window": 16, "index_topk": 8, "rms_norm_eps": 1e-6}
SMALL_IMAGES = {"vision_patch_size": 2, "vision_max_n_token": 384, "vision_min_pixels": 144}

Part = int | tuple[int, int]  # that many text tokens, or the patch grid of an image


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A checkpoint opened three ways: as the oracle's raw configuration and arrays, and as a network.

    drafter: its draft stages, None without any.
    """

    folder: Path
    raw: dict[str, Any]
    weights: dict[str, np.ndarray]
    config: ModelConfig
    network: DeepseekV4
    drafter: DSpark | None = None

    def with_ops(self, **replaced: Callable[..., Any]) -> DeepseekV4:
        """The same network with some operations replaced."""
        ops: OpTable = dataclasses.replace(reference_ops(), **replaced)
        return load_model(self.folder, dtype=torch.float32, ops=ops).network


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One sequence: ids (image rows hold 0), kinds, spans, and (patches, rows, columns) of each image."""

    ids: np.ndarray
    kinds: np.ndarray
    spans: tuple[ImageSpan, ...]
    images: tuple[tuple[np.ndarray, int, int], ...]

    def __len__(self) -> int:
        return len(self.ids)


def open_model(folder: Path) -> TinyModel:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    drafts = DraftKind.DSPARK if "dspark_block_size" in raw else None
    loaded = load_model(folder, dtype=torch.float32, drafts=drafts)
    stored = load_file(folder / "model.safetensors")
    weights = {k: (v.double() if v.is_floating_point() else v).numpy() for k, v in stored.items()}
    opened = {"config": loaded.config, "network": loaded.network, "drafter": loaded.drafter}
    return TinyModel(folder=folder, raw=raw, weights=weights, **opened)


def make_prompt(parts: Sequence[Part], vocab_size: int, seed: int) -> Prompt:
    """Random text ids and random patches of normal size, laid out by the oracle."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    kinds: list[int] = []
    spans: list[ImageSpan] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(2, vocab_size, part).tolist()
            kinds += [layout.TEXT] * part
            continue
        rows, cols = part
        block, _ = layout.image_block(-(-rows // TILE), -(-cols // TILE), position=len(ids))
        first = len(ids) + block.index(layout.START)
        spans.append(ImageSpan(offset=len(ids), first=first, last=len(ids) + len(block) - 1))
        images.append((rng.standard_normal((rows * cols, PATCH_VALUES)).astype(np.float32), rows, cols))
        ids += [0] * len(block)
        kinds += block
    return Prompt(
        ids=np.asarray(ids, dtype=np.int64),
        kinds=np.asarray(kinds, dtype=np.int8),
        spans=tuple(spans),
        images=tuple(images),
    )


def run_oracle(model: TinyModel, prompt: Prompt) -> dict[str, Any]:
    return oracle.run(model.raw, model.weights, prompt.ids.tolist(), prompt.kinds.tolist(), prompt.images)


def encode(network: DeepseekV4, prompt: Prompt) -> torch.Tensor | None:
    """Feature rows of all IMAGE tokens in emission order; all images are encoded in one call."""
    if not prompt.images:
        return None
    patches = torch.from_numpy(np.concatenate([patches for patches, _, _ in prompt.images]))
    grids = [(rows, cols) for _, rows, cols in prompt.images]
    raster = network.encode_images(patches, grids)
    cells = [(-(-rows // TILE), -(-cols // TILE)) for rows, cols in grids]
    parts = raster.split([rows * cols for rows, cols in cells])
    orders = [torch.from_numpy(image_block(*size).encoder_rows.astype(np.int64)) for size in cells]
    return torch.cat([part[order] for part, order in zip(parts, orders, strict=True)])


def sequence(prompt: Prompt, features: torch.Tensor | None) -> SequenceInput:
    """The prompt with the logits of every row wanted."""
    return SequenceInput(
        token_ids=prompt.ids, kinds=prompt.kinds, spans=prompt.spans, features=features, wanted=range(len(prompt))
    )


def batch_of(model: TinyModel, prompts: Sequence[Prompt]) -> ForwardBatch:
    with torch.no_grad():
        inputs = [sequence(prompt, encode(model.network, prompt)) for prompt in prompts]
    return build_batch(inputs, model.config, "cpu")


def logits_of(network: DeepseekV4, batch: ForwardBatch) -> np.ndarray:
    """float32 [R, V]."""
    with torch.no_grad():
        return network(batch).logits.numpy()


def last_streams(network: DeepseekV4, batch: ForwardBatch) -> np.ndarray:
    """Streams after the last layer, float32 [T, n D]: what any later part of the model may know of a row."""
    last = len(network.layers) - 1
    with torch.no_grad():
        return network(batch, stream_taps=(last,)).streams[last].flatten(1).numpy()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a share of the largest expected value."""
    assert found.shape == expected.shape
    assert np.all(np.isfinite(found))
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def smallest_margin(result: dict[str, Any]) -> float:
    """How close the closest choice of an oracle run was, over all routers and indexers."""
    margins = [*result["router_margins"], *(m for m in result["index_margins"] if m is not None)]
    return float(min(margin.min() for margin in margins))
