"""Scenes and how they are drawn.

Owns the records of a picture (what is where, in which colour, on which background) and the drawing with Pillow. A scene
says everything: drawing it twice gives the same pixels, noise included. Invariants: boxes lie inside the picture and do
not overlap (kept by `skills.placing`); an object is only drawn in a colour that its background allows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from deepspan.skills.fonts import print_text

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom lie outside

COLOURS: dict[str, Colour] = {
    "red": (214, 34, 40),
    "green": (36, 150, 62),
    "blue": (38, 84, 222),
    "yellow": (250, 216, 36),
    "purple": (142, 48, 172),
    "orange": (246, 130, 22),
    "black": (20, 20, 22),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
LIGHT_PAPERS: tuple[Colour, ...] = (
    (255, 255, 255),
    (236, 236, 238),
    (206, 208, 212),
    (250, 243, 226),
    (220, 232, 246),
    (224, 240, 222),
    (248, 226, 230),
)
DARK_PAPERS: tuple[Colour, ...] = (
    (40, 42, 48),
    (22, 28, 54),
    (54, 40, 40),
    (26, 50, 46),
)
STYLES = ("plain", "soft", "stripes")
MAX_NOISE = 8
_MASTER = 240  # size of the large masks from which shapes are scaled down
_TILE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A filled shape. kind: one of `SHAPES`. colour: its name. ink: the colour drawn, a little off the named one."""

    kind: str
    colour: str
    ink: Colour
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A printed string. font and height: as for `fonts.print_text`, which also gives the size of the box."""

    text: str
    colour: str
    ink: Colour
    font: str
    height: int
    box: Box

    def character_boxes(self) -> tuple[Box, ...]:
        """Boxes of the characters from left to right; together they tile `box`."""
        edges = print_text(self.text, self.font, self.height).edges
        left, top, _, bottom = self.box
        return tuple((left + a, top, left + b, bottom) for a, b in pairwise(edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """paper: its colour. style: one of `STYLES`. noise: largest change of a channel, 0 to `MAX_NOISE`."""

    paper: Colour
    style: str
    noise: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One picture. seed: fixes the pattern of the background and the noise."""

    width: int
    height: int
    background: Background
    objects: tuple[Shape | Text, ...]
    seed: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(thing for thing in self.objects if isinstance(thing, Shape))

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(thing for thing in self.objects if isinstance(thing, Text))


def draw(scene: Scene) -> Image.Image:
    """Draw a scene at its own size; mode "RGB"."""
    rng = np.random.default_rng(scene.seed)
    image = _paper(scene, rng)
    for thing in scene.objects:
        image.paste(thing.ink, thing.box, _mask(thing))
    return _noisy(image, scene.background.noise, rng)


def allowed_colours(paper: Colour, *, for_text: bool) -> tuple[str, ...]:
    """Names of the colours that stand out from a background; thin letters need more contrast than filled shapes."""
    return _allowed(paper, 2.5 if for_text else 1.35)


@lru_cache(maxsize=64)
def _allowed(paper: Colour, contrast: float) -> tuple[str, ...]:
    return tuple(
        name
        for name, colour in COLOURS.items()
        if _contrast(colour, paper) >= contrast and sum(abs(a - b) for a, b in zip(colour, paper, strict=True)) >= 125
    )


def _contrast(first: Colour, second: Colour) -> float:
    """Contrast ratio, 1 to 21, after WCAG 2 (with a gamma of 2, which needs no power function)."""
    weights = (0.2126, 0.7152, 0.0722)
    light = [sum(w * (c / 255) ** 2 for w, c in zip(weights, colour, strict=True)) for colour in (first, second)]
    return (max(light) + 0.05) / (min(light) + 0.05)


def _paper(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """The empty background: one colour, slow changes of brightness, or faint stripes."""
    size, paper, style = (scene.width, scene.height), scene.background.paper, scene.background.style
    if style == "plain":
        return Image.new("RGB", size, paper)
    if style == "soft":
        columns, rows = (int(n) for n in rng.integers(2, 5, size=2))
        shades = rng.integers(-14, 15, size=(rows, columns, 1))
        return _shaded(paper, shades).resize(size, Image.Resampling.BILINEAR)
    period, depth = int(rng.integers(10, 40)), int(rng.integers(5, 11))
    across = bool(rng.integers(2))
    length = scene.height if across else scene.width
    shades = (np.arange(length) // period % 2 * depth * (-1 if sum(paper) > 384 else 1)).reshape(-1, 1, 1)
    return _shaded(paper, shades if across else shades.transpose(1, 0, 2)).resize(size, Image.Resampling.NEAREST)


def _shaded(paper: Colour, shades: np.ndarray) -> Image.Image:
    """An image of `paper` made lighter or darker. shades: int [rows, columns, 1]."""
    return Image.fromarray(np.clip(np.array(paper) + shades, 0, 255).astype(np.uint8))


def _noisy(image: Image.Image, noise: int, rng: np.random.Generator) -> Image.Image:
    if noise == 0:
        return image
    left, top = int(rng.integers(_TILE - image.width + 1)), int(rng.integers(_TILE - image.height + 1))
    tile = _noise_tile(noise).crop((left, top, left + image.width, top + image.height))
    return ImageChops.add(image, tile, scale=1, offset=-noise)


@lru_cache(maxsize=MAX_NOISE)
def _noise_tile(noise: int) -> Image.Image:
    """A large piece of noise that pictures cut theirs from: values 0 to 2 * noise, highest in the middle."""
    rng = np.random.default_rng((noise, 20260))
    halves = rng.integers(0, noise + 1, size=(2, _TILE, _TILE, 3), dtype=np.uint8)
    return Image.fromarray(halves[0] + halves[1])


def _mask(thing: Shape | Text) -> Image.Image:
    if isinstance(thing, Text):
        return print_text(thing.text, thing.font, thing.height).mask
    left, top, right, bottom = thing.box
    return _shape_mask(thing.kind, right - left, bottom - top)


@lru_cache(maxsize=1024)
def _shape_mask(kind: str, width: int, height: int) -> Image.Image:
    return _master(kind).resize((width, height), Image.Resampling.BOX)


@lru_cache(maxsize=len(SHAPES))
def _master(kind: str) -> Image.Image:
    mask = Image.new("L", (_MASTER, _MASTER))
    _OUTLINES[kind](ImageDraw.Draw(mask))
    return mask


def _polygon(*points: tuple[float, float]) -> Callable[[ImageDraw.ImageDraw], None]:
    scaled = [(x * (_MASTER - 1), y * (_MASTER - 1)) for x, y in points]
    return lambda draw: draw.polygon(scaled, fill=255)


def _ellipse(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((0, 0, _MASTER - 1, _MASTER - 1), fill=255)


_OUTLINES: dict[str, Callable[[ImageDraw.ImageDraw], None]] = {
    "circle": _ellipse,
    "square": _polygon((0.04, 0.04), (0.96, 0.04), (0.96, 0.96), (0.04, 0.96)),
    "triangle": _polygon((0.5, 0), (1, 1), (0, 1)),
    "star": _polygon(
        *((0.5, 0), (0.623, 0.363), (1, 0.363), (0.69, 0.6), (0.81, 1)),
        *((0.5, 0.76), (0.19, 1), (0.31, 0.6), (0, 0.363), (0.377, 0.363)),
    ),
    "cross": _polygon(
        *((0.34, 0), (0.66, 0), (0.66, 0.34), (1, 0.34), (1, 0.66), (0.66, 0.66)),
        *((0.66, 1), (0.34, 1), (0.34, 0.66), (0, 0.66), (0, 0.34), (0.34, 0.34)),
    ),
    "diamond": _polygon((0.5, 0), (0.88, 0.5), (0.5, 1), (0.12, 0.5)),
}
