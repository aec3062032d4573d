"""Pictures for training alone, that teach more at once than those of the skills.

A scene of the skills shows a few objects in a hundred cells and holds one string to read; a page shows dozens, and
strings are up to six.
"""

from collections import Counter
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np

from deepspan.skills import questions
from deepspan.skills.fonts import CHARACTERS, FONTS, print_text
from deepspan.skills.pictures import SHAPES, Scene, Shape, Text, allowed_colours
from deepspan.skills.placing import background, between, chance, ink, part_of, pick, pick_some, shape
from deepspan.skills.records import Sample, Skill, Turn
from deepspan.skills.tasks import apart, compose, counting, names_of, reading
from deepspan.skills.text_tasks import WORDS, value

LOW, HIGH = 36, 110  # heights of lines, in pixels of the page, which is about as large as what the model sees
SHAPE_SHARE = 0.25


def page(rng: np.random.Generator) -> Sample:
    """Lines of strings and shapes, asked for the strings that are alone in their colour.

    Where there is none, the question is one that nobody asks: a page is there for its cells.
    """
    width, height = int(rng.integers(380, 460)), int(rng.integers(380, 460))
    paper = background(rng)
    inks = _inks(rng, allowed_colours(paper.paper, for_text=True))
    objects: list[Shape | Text] = []
    top = int(rng.integers(2, 20))
    while top + LOW < height:
        line = int(between(rng, LOW, min(HIGH, height - top)))
        left = int(rng.integers(2, 30))
        while left + LOW < width:
            thing = _thing(rng, inks, left, top, line)
            if thing.box[2] > width or thing.box[3] > height:
                break
            objects.append(thing)
            left = thing.box[2] + int(rng.integers(8, 40))
        top += line + int(rng.integers(8, 24))
    scene = Scene(width=width, height=height, background=paper, objects=tuple(objects), seed=int(rng.integers(2**31)))
    turns = questions.choose(rng, questions.reading(rng, scene), 6)
    return Sample(images=(scene,), turns=turns or (Turn(question="?", answer="!", skill="page"),))


def strings(rng: np.random.Generator) -> Sample:
    """`reading` with two to six strings."""
    return reading(rng, counts=(2, 3, 4, 5, 6))


def listing(rng: np.random.Generator) -> Sample:
    """All shapes of a picture from left to right, with colours and kinds, and with their places.

    Each word of such an answer asks for the next: a network learns from it to look for what it has just said, before it
    has to carry a word of the question to where the answer is made.
    """
    paper = background(rng)
    colours = allowed_colours(paper.paper, for_text=False)
    count = int(rng.integers(2, 1 + min(len(SHAPES), len(colours))))
    looks = list(zip(pick_some(rng, SHAPES, count), pick_some(rng, colours, count), strict=True))
    scene = compose(rng, paper, looks, [])
    shapes = sorted(scene.shapes, key=lambda one: one.box[0] + one.box[2])
    placed = [(one, part_of(scene, one.box)) for one in shapes]
    answers = {"List the places.": ", ".join(f"{one.kind} {part}" for one, part in placed if part is not None)}
    if chance(rng, 0.5):
        answers["List the colours."] = ", ".join(f"{one.colour} {one.kind}" for one in shapes)
    else:
        answers["List the shapes."] = ", ".join(f"{one.kind} {one.colour}" for one in shapes)
    turns = [Turn(question=name, answer=text, skill="listing") for name, text in answers.items() if text]
    return Sample(images=(scene,), turns=tuple(turns[int(i)] for i in rng.permutation(len(turns))))


def album(rng: np.random.Generator) -> Sample:
    """Which of two or three pictures shows what, all of them in random order: `listing` for `which`."""
    while True:
        scenes = apart(rng, pick(rng, (2, 3)))
        names = [names_of(scenes, index) for index in range(len(scenes))]
        if all(names):
            break
    parts = [f"{pick(rng, own)}: {ordinal}" for own, ordinal in zip(names, questions.ORDINALS, strict=False)]
    answer = ", ".join(pick_some(rng, parts, len(parts)))
    return Sample(images=scenes, turns=(Turn(question="List the images.", answer=answer, skill="album"),))


def tally(rng: np.random.Generator) -> Sample:
    """How many there are of each kind, or of each colour, in random order: `listing` for `counting`."""
    scene = counting(rng).images[0]
    by_kind = chance(rng, 0.6)
    counts = Counter(one.kind if by_kind else one.colour for one in scene.shapes)
    parts = [f"{name}: {questions.NUMBERS[count]}" for name, count in counts.items() if count < len(questions.NUMBERS)]
    answer = ", ".join(pick_some(rng, parts, len(parts)))
    question = "Count the kinds." if by_kind else "Count the colours."
    return Sample(images=(scene,), turns=(Turn(question=question, answer=answer, skill="tally"),))


def shuffled(rng: np.random.Generator) -> Sample:
    """The pairs of `lookup`, said again in another order: the same for text as `listing` for pictures."""
    count = int(rng.integers(3, 9))
    pairs = [f"{key}: {value(rng)}" for key in pick_some(rng, WORDS, count)]
    answer = ", ".join(pick_some(rng, pairs, count))
    return Sample(images=(), turns=(Turn(question=", ".join(pairs) + ". List them.", answer=answer, skill="shuffled"),))


EXERCISES: MappingProxyType[str, Skill] = MappingProxyType(
    {"page": page, "strings": strings, "listing": listing, "album": album, "tally": tally, "shuffled": shuffled}
)


def _inks(rng: np.random.Generator, names: tuple[str, ...]) -> Iterator[str]:
    """Each colour once, then the first one for ever, so that the others stay alone."""
    first, *others = pick_some(rng, names, len(names))
    yield from (first, *others)
    while True:
        yield first


def _thing(rng: np.random.Generator, inks: Iterator[str], left: int, top: int, line: int) -> Shape | Text:
    colour = next(inks)
    if chance(rng, SHAPE_SHARE):
        side = int(between(rng, max(LOW, 0.6 * line), line))
        return shape(rng, pick(rng, tuple(SHAPES)), colour, (left, top, left + side, top + side))
    font, text = pick(rng, tuple(FONTS)), "".join(pick(rng, CHARACTERS) for _ in range(int(rng.integers(1, 5))))
    letters = max(LOW, int(0.85 * line))
    mask = print_text(text, font, letters).mask
    box = (left, top, left + mask.width, top + mask.height)
    return Text(text=text, colour=colour, ink=ink(rng, colour), font=font, height=letters, box=box)
