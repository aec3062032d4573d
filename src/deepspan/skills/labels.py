"""What is under each cell of the model's view: dense targets to warm up a vision tower.

Owns the class numbers. Geometry comes in as plain numbers (size of the canvas, place of the picture on it), so that
this part needs nothing from the resize plan. Called by the training scripts.
"""

from dataclasses import dataclass

import numpy as np

from deepspan.skills.fonts import CHARACTERS
from deepspan.skills.pictures import COLOURS, SHAPES, Box, Scene, Shape, Text

SHAPE_CLASSES = ("none", *SHAPES, "text")
COLOUR_CLASSES = ("none", *COLOURS)
CHARACTER_CLASSES = ("none", *CHARACTERS)
CENTRE_CLASSES = ("none", "centre")
MOST_ALIKE = 7  # numbers of shapes are told up to here; more are as many


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLabels:
    """Class numbers, int64: indices of the tuples above, 0 where there is no object.

    shape, colour: [rows, columns]. centre: [rows, columns], where the centre of a shape lies: a shape covers several
    cells, and has one of these, so that what is counted are shapes. alike: [3, rows, columns], at a shape's centre how
    many shapes are of its kind, of its colour, and there at all (itself included, at most `MOST_ALIKE`); 0 elsewhere.
    character: [3, rows, columns], at a sixth, a half and five sixths of a cell's width, because a cell can show parts
    of three narrow characters.
    """

    shape: np.ndarray
    colour: np.ndarray
    character: np.ndarray
    centre: np.ndarray
    alike: np.ndarray


def cell_labels(
    scene: Scene,
    *,
    canvas_width: int,
    canvas_height: int,
    content_left: int,
    content_top: int,
    content_width: int,
    content_height: int,
    cell: int = 42,
) -> CellLabels:
    """Label each cell with the object whose box covers the cell's centre; of a text, the characters on its middle line.

    canvas_*: size of what the encoder sees. content_*: where the scene, resized, lies on the canvas. cell: side of a
    cell. All in pixels of the canvas. There are ceil(height / cell) x ceil(width / cell) cells.
    """
    rows, columns = -(-canvas_height // cell), -(-canvas_width // cell)
    # Centres of the cells, in pixels of the scene.
    x = ((np.arange(columns) + 0.5) * cell - content_left) * (scene.width / content_width)
    y = ((np.arange(rows) + 0.5) * cell - content_top) * (scene.height / content_height)
    shape, colour = (np.zeros((rows, columns), dtype=np.int64) for _ in range(2))
    character = np.zeros((3, rows, columns), dtype=np.int64)
    centre = np.zeros((rows, columns), dtype=np.int64)
    alike = np.zeros((3, rows, columns), dtype=np.int64)
    third = cell / 3 * (scene.width / content_width)
    for thing in scene.objects:
        under = _covered(thing.box, x, y)
        kind = "text" if isinstance(thing, Text) else thing.kind
        shape[under] = SHAPE_CLASSES.index(kind)
        colour[under] = COLOUR_CLASSES.index(thing.colour)
        if isinstance(thing, Text):
            for letter, box in zip(thing.text, thing.character_boxes(), strict=True):
                for column, shift in enumerate((-third, 0, third)):
                    character[column, _covered(box, x + shift, y)] = CHARACTER_CLASSES.index(letter)
        else:
            left, top, right, bottom = thing.box
            column = int((content_left + (left + right) / 2 * content_width / scene.width) // cell)
            row = int((content_top + (top + bottom) / 2 * content_height / scene.height) // cell)
            centre[row, column] = 1
            alike[:, row, column] = _alike(thing, scene)
    return CellLabels(shape=shape, colour=colour, character=character, centre=centre, alike=alike)


def _alike(shape: Shape, scene: Scene) -> tuple[int, ...]:
    """How many shapes share its kind, share its colour, and are there at all."""
    counts = (
        sum(other.kind == shape.kind for other in scene.shapes),
        sum(other.colour == shape.colour for other in scene.shapes),
        len(scene.shapes),
    )
    return tuple(min(count, MOST_ALIKE) for count in counts)


def _covered(box: Box, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Bool [rows, columns]: whether the point (x of its column, y of its row) lies in the box."""
    left, top, right, bottom = box
    return ((y >= top) & (y < bottom))[:, None] & ((x >= left) & (x < right))[None, :]
