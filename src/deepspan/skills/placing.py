"""How large pictures are, and where objects go without touching each other.

Owns the sizes: what the model sees is the picture enlarged to an area of at least `MIN_AREA` pixels, one token per cell
of 42 x 42 pixels, so object sizes are chosen in those pixels. Invariants: boxes keep a margin to the border and a
gap to each other. Called by `skills.tasks`.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from deepspan.skills.fonts import FONTS, print_text
from deepspan.skills.pictures import (
    COLOURS,
    DARK_PAPERS,
    LIGHT_PAPERS,
    MAX_NOISE,
    SHAPES,
    STYLES,
    Background,
    Box,
    Colour,
    Scene,
    Shape,
    Text,
    allowed_colours,
)

MIN_AREA = 384 * 384
MAX_AREA = 540_000
MAX_SIDE = 960
MIN_SHAPE = 46  # pixels after enlarging: a shape covers the centre of at least one cell
MIN_TEXT = 43
PARTS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
_BORDER = 0.07  # a centre closer than this (of the side) to the line between two thirds has no clear part

Item = TypeVar("Item")


def pick(rng: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(rng.integers(len(items)))]


def pick_some(rng: np.random.Generator, items: Sequence[Item], count: int) -> list[Item]:
    """`count` different items in random order."""
    return [items[int(i)] for i in rng.permutation(len(items))[:count]]


def chance(rng: np.random.Generator, probability: float) -> bool:
    return float(rng.random()) < probability


def between(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(rng.random())


def picture_size(rng: np.random.Generator) -> tuple[int, int]:
    """Width and height: mostly small and of moderate aspect, with tails up to 900 x 600 and to 1:6 and 6:1."""
    luck = rng.random()
    aspect = between(rng, 1, 1.8) if luck < 0.75 else between(rng, 1.8, 3.5) if luck < 0.95 else between(rng, 3.5, 6)
    luck = rng.random()
    low, high = (30_000, MIN_AREA) if luck < 0.85 else (MIN_AREA, 280_000) if luck < 0.97 else (280_000, MAX_AREA)
    short = math.sqrt(between(rng, low, high) / aspect)
    short, long = round(short), min(MAX_SIDE, round(short * aspect))
    return (long, short) if chance(rng, 0.55) else (short, long)


def view_scale(width: int, height: int) -> float:
    """Pixels that the model sees per pixel drawn; large pictures count as 1, although the largest are shrunk a bit."""
    return max(1.0, math.sqrt(MIN_AREA / (width * height)))


def background(rng: np.random.Generator) -> Background:
    papers = DARK_PAPERS if chance(rng, 0.45) else LIGHT_PAPERS
    return Background(paper=pick(rng, papers), style=pick(rng, STYLES), noise=int(rng.integers(MAX_NOISE + 1)))


def ink(rng: np.random.Generator, colour: str) -> Colour:
    """The named colour, a little changed."""
    red, green, blue = (int(np.clip(c + rng.integers(-9, 10), 0, 255)) for c in COLOURS[colour])
    return red, green, blue


def pick_colours(rng: np.random.Generator, paper: Background, count: int, *, for_text: bool) -> list[str]:
    """`count` colours that stand out; all different as long as the background allows so many."""
    names = allowed_colours(paper.paper, for_text=for_text)
    colours: list[str] = []
    while len(colours) < count:
        colours += pick_some(rng, names, count - len(colours))
    return colours


def shape_sizes(rng: np.random.Generator, width: int, height: int, count: int) -> list[int]:
    """Side lengths for `count` shapes that will share a picture."""
    low = math.ceil(MIN_SHAPE / view_scale(width, height))
    high = max(low, min(0.5 * min(width, height), 0.5 * math.sqrt(width * height / max(2, count))))
    return [math.ceil(between(rng, low, high)) for _ in range(count)]


def shape(rng: np.random.Generator, kind: str, colour: str, box: Box) -> Shape:
    assert kind in SHAPES
    return Shape(kind=kind, colour=colour, ink=ink(rng, colour), box=box)


def unplaced_text(
    rng: np.random.Generator, text: str, colour: str, size: tuple[int, int], max_height: float
) -> Text | None:
    """A text in some font at the upper left corner, or None if it does not fit. max_height: pixels of the picture."""
    width, height = size
    font, scale = pick(rng, tuple(FONTS)), view_scale(width, height)
    low = math.ceil(MIN_TEXT / scale)
    high = min(max_height, 150 / scale, 0.6 * height)
    room = width - 2 * _margin(width, height)
    for _ in range(4):
        letters = math.ceil(between(rng, low, max(low, high)))
        mask = print_text(text, font, letters).mask
        if mask.width <= room and mask.height <= height - 2 * _margin(width, height):
            box = (0, 0, mask.width, mask.height)
            return Text(text=text, colour=colour, ink=ink(rng, colour), font=font, height=letters, box=box)
        high = max(low, (letters * room / mask.width))
    return None


def _margin(width: int, height: int) -> int:
    return math.ceil(6 / view_scale(width, height))


def scatter(
    rng: np.random.Generator,
    size: tuple[int, int],
    wishes: Sequence[tuple[int, int]],
    parts: Sequence[str | None],
) -> list[Box] | None:
    """Boxes of the wished (width, height), apart from each other; None if they were not found in a few tries.

    parts: for each box one of `PARTS` in which its centre must clearly lie, or None for anywhere.
    """
    boxes: list[Box] = []
    gap = math.ceil(10 / view_scale(*size))
    for wish, part in zip(wishes, parts, strict=True):
        for _ in range(25):
            box = _random_box(rng, size, wish, part)
            if box is None:
                return None
            if not any(_touch(box, other, gap) for other in boxes):
                boxes.append(box)
                break
        else:
            return None
    return boxes


def _random_box(rng: np.random.Generator, size: tuple[int, int], wish: tuple[int, int], part: str | None) -> Box | None:
    corner = []
    thirds = (None, None) if part is None else (PARTS.index(part) % 3, PARTS.index(part) // 3)
    for side, extent, third in zip(size, wish, thirds, strict=True):
        low, high = _margin(*size), side - _margin(*size) - extent
        if third is not None:
            if third > 0:
                low = max(low, math.ceil(side * (third / 3 + _BORDER) - extent / 2))
            if third < 2:
                high = min(high, math.floor(side * ((third + 1) / 3 - _BORDER) - extent / 2))
        if high < low:
            return None
        corner.append(int(rng.integers(low, high + 1)))
    left, top = corner
    return left, top, left + wish[0], top + wish[1]


def _touch(first: Box, second: Box, gap: int) -> bool:
    return (
        first[0] < second[2] + gap
        and second[0] < first[2] + gap
        and first[1] < second[3] + gap
        and second[1] < first[3] + gap
    )


def part_of(scene: Scene, box: Box) -> str | None:
    """Part of the picture in which the centre of a box clearly lies, or None if it is close to a line between two."""
    index = 0
    for side, low, high, step in ((scene.width, box[0], box[2], 1), (scene.height, box[1], box[3], 3)):
        centre = (low + high) / 2 / side
        third = min(2, int(3 * centre))
        if any(abs(centre - line) < _BORDER - 1e-9 for line in (1 / 3, 2 / 3)):
            return None
        index += step * third
    return PARTS[index]
