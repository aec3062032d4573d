"""Training batches: samples of the skills in the served chat format, made by a process of its own.

A conversation is encoded by the package's own encoder, exactly as it will be served; the loss falls on the answers and
their end. Batches are lists of `Example`, cut by a budget of tokens.
"""

import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspan.config.model import ModelConfig, VisionConfig, load_model_config
from deepspan.core.media import ImageSpan, PreparedImage
from deepspan.engine.inputs import expand_images
from deepspan.image.prepare import prepare_image
from deepspan.image.resize import plan_resize
from deepspan.skills.labels import cell_labels
from deepspan.skills.pictures import Scene, draw
from deepspan.skills.records import Sample, messages_of
from deepspan.skills.suite import TRAIN_SEED, sample
from deepspan.text.chat import encode_chat
from deepspan.text.switches import ChatOptions
from deepspan.text.tokenizer import Tokenizer
from training.exercises import EXERCISES


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One conversation, encoded. targets: int64 [T], the next token where it counts for the loss, -1 elsewhere.

    turns: int64 [T], number of the answer a target belongs to. skills: of each answer.
    labels: per image int64 [9, cells]: shape, colour, three characters, centre and three numbers of shapes alike (see
    `CellLabels`), of each cell in raster order.
    """

    token_ids: np.ndarray
    kinds: np.ndarray
    spans: tuple[ImageSpan, ...]
    targets: np.ndarray
    turns: np.ndarray
    skills: tuple[str, ...]
    images: tuple[PreparedImage, ...]
    labels: tuple[np.ndarray, ...]


def encode_example(item: Sample, config: ModelConfig, tokenizer: Tokenizer) -> Example:
    """Encode a sample as the server would, and mark what is to be learnt."""
    vision = config.vision
    assert vision is not None
    pictures = [draw(scene) for scene in item.images]
    images = tuple(prepare_image(picture, vision) for picture in pictures)
    segments = encode_chat(messages_of(item, pictures), ChatOptions(effort="none", ending="open"))
    token_ids, kinds, spans = expand_images(tokenizer.encode(segments), images, tokenizer)
    targets, turns = _targets(token_ids, tokenizer)
    assert turns.max() + 1 == len(item.turns), "an answer for every turn"
    return Example(
        token_ids=token_ids,
        kinds=kinds,
        spans=spans,
        targets=targets,
        turns=turns,
        skills=tuple(turn.skill for turn in item.turns),
        images=images,
        labels=tuple(_labels(scene, vision) for scene in item.images),
    )


def _targets(token_ids: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Next tokens from each closing think tag (the end of the assistant's header) to the end of its answer."""
    special = tokenizer.special
    targets, turns = (np.full(len(token_ids), -1, dtype=np.int64) for _ in range(2))
    answering, turn = False, -1
    for position, token_id in enumerate(token_ids[:-1].tolist()):
        turn += token_id == special.think_close
        answering = (answering or token_id == special.think_close) and token_id != special.eos
        if answering:
            targets[position], turns[position] = token_ids[position + 1], turn
    return targets, turns


def _labels(scene: Scene, vision: VisionConfig) -> np.ndarray:
    plan = plan_resize(scene.width, scene.height, vision)
    labels = cell_labels(
        scene,
        canvas_width=plan.canvas_width,
        canvas_height=plan.canvas_height,
        content_left=plan.content_left,
        content_top=plan.content_top,
        content_width=plan.content_width,
        content_height=plan.content_height,
        cell=vision.patch_size * vision.downsample_ratio,
    )
    planes = (labels.shape, labels.colour, *labels.character, labels.centre, *labels.alike)
    return np.stack([plane.ravel() for plane in planes])


def examples(
    folder: Path,
    first: int,
    weights: dict[str, float] | None,
    max_tokens: int,
    seed: int = TRAIN_SEED,
    stride: int = 1,
) -> Iterator[tuple[int, list[Example]]]:
    """Endless batches (index after the batch, examples) of about `max_tokens` tokens.

    first, stride: number of the first sample, and the step to the next (a rank's share of the samples).
    weights: how often each skill (or name of `EXERCISES`) is drawn, None for the suite's own.
    """
    config, tokenizer = load_model_config(folder), Tokenizer(folder, vision=True)
    index, batch, size = first, [], 0
    while True:
        example = encode_example(_draw(seed, index, weights), config, tokenizer)
        index += stride
        # A patch costs about a quarter of a token; a batch is bounded by its cost.
        size += len(example.token_ids) + sum(len(image.patches) for image in example.images) // 4
        batch.append(example)
        if size >= max_tokens:
            yield index, batch
            batch, size = [], 0


def _draw(seed: int, index: int, weights: dict[str, float] | None) -> Sample:
    if weights is None:
        return sample(seed, index)
    names = sorted(weights)
    shares = np.asarray([weights[name] for name in names])
    rng = np.random.default_rng((seed, index))
    skill = str(rng.choice(names, p=shares / shares.sum()))
    return EXERCISES[skill](rng) if skill in EXERCISES else sample(seed, index, skill)


def _produce(out: Any, arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    for item in examples(*arguments):
        while True:
            try:
                out.put(item, timeout=5)
                break
            except queue.Full:
                if not parent.is_alive():  # a trainer that was killed cannot say so
                    return


class Batches:
    """`examples` from a background process, a few batches ahead."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(maxsize=3)
        self._process = context.Process(target=_produce, args=(self._queue, arguments), daemon=True)
        self._process.start()

    def next(self) -> tuple[int, list[Example]]:
        while True:
            try:
                return self._queue.get(timeout=30)
            except queue.Empty:
                if not self._process.is_alive():
                    raise RuntimeError("the process that makes training batches has died") from None

    def close(self) -> None:
        self._process.terminate()
