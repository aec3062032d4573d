"""Pages: pictures full of characters and shapes, to warm up the vision tower.

A scene of the skills shows a few objects in a hundred cells; a page shows dozens, so that each picture teaches more.
"""

import numpy as np

from deepspan.skills.fonts import CHARACTERS, FONTS, print_text
from deepspan.skills.pictures import SHAPES, Scene, Shape, Text
from deepspan.skills.placing import background, between, chance, ink, pick, pick_colours, shape
from deepspan.skills.records import Sample, Turn

LOW, HIGH = 36, 110  # heights of lines, in pixels of the page, which is about as large as what the model sees
SHAPE_SHARE = 0.25


def page(rng: np.random.Generator) -> Sample:
    """One page, with a question that nobody asks (warming up looks at cells only)."""
    width, height = int(rng.integers(380, 460)), int(rng.integers(380, 460))
    paper = background(rng)
    objects: list[Shape | Text] = []
    top = int(rng.integers(2, 20))
    while top + LOW < height:
        line = int(between(rng, LOW, min(HIGH, height - top)))
        left = int(rng.integers(2, 30))
        while left + LOW < width:
            colour = pick_colours(rng, paper, 1, for_text=True)[0]
            thing = _thing(rng, colour, left, top, line)
            if thing.box[2] > width or thing.box[3] > height:
                break
            objects.append(thing)
            left = thing.box[2] + int(rng.integers(8, 40))
        top += line + int(rng.integers(8, 24))
    scene = Scene(width=width, height=height, background=paper, objects=tuple(objects), seed=int(rng.integers(2**31)))
    return Sample(images=(scene,), turns=(Turn(question="?", answer="!", skill="page"),))


def _thing(rng: np.random.Generator, colour: str, left: int, top: int, line: int) -> Shape | Text:
    if chance(rng, SHAPE_SHARE):
        side = int(between(rng, max(LOW, 0.6 * line), line))
        return shape(rng, pick(rng, tuple(SHAPES)), colour, (left, top, left + side, top + side))
    font, text = pick(rng, tuple(FONTS)), "".join(pick(rng, CHARACTERS) for _ in range(int(rng.integers(1, 5))))
    letters = max(LOW, int(0.85 * line))
    mask = print_text(text, font, letters).mask
    box = (left, top, left + mask.width, top + mask.height)
    return Text(text=text, colour=colour, ink=ink(rng, colour), font=font, height=letters, box=box)
