"""Picture exercises: what is drawn, and what is asked about it.

Owns one generator per skill and the mixed scene. Every generator takes a random generator and returns a `Sample` whose
questions have one right answer (see `skills.questions`). Listed in `skills.suite`.
"""

from collections.abc import Sequence

import numpy as np

from deepspan.skills import questions
from deepspan.skills.fonts import CHARACTERS
from deepspan.skills.pictures import SHAPES, Background, Box, Scene, Shape, Text, allowed_colours
from deepspan.skills.placing import (
    PARTS,
    background,
    chance,
    pick,
    pick_colours,
    pick_some,
    picture_size,
    scatter,
    shape,
    shape_sizes,
    unplaced_text,
)
from deepspan.skills.questions import NUMBERS
from deepspan.skills.records import Sample, Turn

Look = tuple[str, str]  # kind and colour of a shape, or text and its colour
MAX_LENGTH = 6


def reading(rng: np.random.Generator, *, counts: Sequence[int] = (1, 1, 1, 2, 2, 3)) -> Sample:
    """Read printed strings of 1 to `MAX_LENGTH` characters, sometimes next to a shape. counts: to draw from."""
    paper = background(rng)
    count = pick(rng, counts)
    texts = _texts(rng, paper, count, MAX_LENGTH)
    shapes = _shapes(rng, paper, int(chance(rng, 0.25)))
    scene = compose(rng, paper, shapes, texts)
    return Sample(images=(scene,), turns=questions.choose(rng, questions.reading(rng, scene), count))


def colour(rng: np.random.Generator) -> Sample:
    """Name the colour of shapes, sometimes of a text."""
    paper = background(rng)
    count = int(rng.integers(1, 6))
    shapes = list(zip(pick_some(rng, SHAPES, count), _any_colours(rng, paper, count), strict=True))
    texts = _texts(rng, paper, int(chance(rng, 0.2)), 4)
    scene = compose(rng, paper, shapes, texts)
    return Sample(images=(scene,), turns=questions.choose(rng, questions.colour(rng, scene), 4))


def shape_of(rng: np.random.Generator) -> Sample:
    """Name shapes by their colour, or say what a picture with one shape shows."""
    paper = background(rng)
    count = pick(rng, (1, 1, 2, 3, 4, 5))
    colours = pick_colours(rng, paper, count, for_text=False)
    scene = compose(rng, paper, [(pick(rng, SHAPES), name) for name in colours], [])
    return Sample(images=(scene,), turns=questions.choose(rng, questions.shape(rng, scene), 4))


def position(rng: np.random.Generator) -> Sample:
    """Say where objects are: in which part of the picture, and on which side of each other."""
    paper = background(rng)
    count = pick(rng, (1, 2, 2, 3, 3, 4))
    while True:
        shapes, texts = _shapes(rng, paper, count), _texts(rng, paper, int(chance(rng, 0.15)), 3)
        parts = pick_some(rng, PARTS, len(shapes) + len(texts))
        scene = compose(rng, paper, shapes, texts, parts)
        where = questions.parts(rng, scene)
        beside = questions.sides(rng, scene) + questions.neighbours(rng, scene)
        turns = questions.choose(rng, where, 2) + questions.choose(rng, beside, 3)
        if turns:
            return Sample(images=(scene,), turns=tuple(turns[int(i)] for i in rng.permutation(len(turns))))


def counting(rng: np.random.Generator) -> Sample:
    """Count one to six shapes of a kind, of a colour, or all of them, among up to three others."""
    paper = background(rng)
    count = int(rng.integers(1, 7))
    others = pick(rng, (0, 1, 2, 3)) if count < 5 else int(rng.integers(2))
    way = pick(rng, ("kind", "kind", "colour", "all"))
    colours = pick_some(rng, allowed_colours(paper.paper, for_text=False), 99)
    kinds = pick_some(rng, SHAPES, len(SHAPES))
    if way == "kind":
        shapes = [(kinds[0], pick(rng, colours)) for _ in range(count)]
        shapes += [(pick(rng, kinds[1:]), pick(rng, colours)) for _ in range(others)]
        noun = questions.plural(kinds[0])
    elif way == "colour":
        shapes = [(pick(rng, kinds), colours[0]) for _ in range(count)]
        shapes += [(pick(rng, kinds), pick(rng, colours[1:])) for _ in range(others)]
        noun = f"{colours[0]} shapes"
    else:
        shapes = [(pick(rng, kinds), pick(rng, colours)) for _ in range(count)]
        noun = "shapes"
    scene = compose(rng, paper, shapes, [])
    asked = questions.counting(rng, scene)
    main = [question for question in asked if question.topic == ("counting", noun)]
    rest = [question for question in asked if question.topic != ("counting", noun)]
    rest = [question for question in rest if question.turn.answer != NUMBERS[1] or chance(rng, 0.2)]
    return Sample(images=(scene,), turns=questions.choose(rng, main, 1) + questions.choose(rng, rest, 2))


def which(rng: np.random.Generator) -> Sample:
    """Tell two or three pictures apart: which one shows a thing, and what the n-th one shows."""
    while True:
        scenes = apart(rng, pick(rng, (2, 3)))
        turns = [_which_turn(rng, scenes, index) for index in rng.permutation(len(scenes))]
        asked = tuple(turn for turn in turns if turn is not None)
        if asked:
            return Sample(images=scenes, turns=asked)


def scene(rng: np.random.Generator) -> Sample:
    """One picture with shapes and often a text, asked about with all skills."""
    paper = background(rng)
    shapes = _shapes(rng, paper, int(rng.integers(1, 6)))
    texts = _texts(rng, paper, int(chance(rng, 0.6)), MAX_LENGTH)
    parts = pick_some(rng, PARTS, len(shapes)) + [None] * len(texts) if chance(rng, 0.5) else None
    picture = compose(rng, paper, shapes, texts, parts)
    turns = questions.choose(rng, questions.reading(rng, picture), 1)
    counts = questions.counting(rng, picture)
    several = [count for count in counts if count.turn.answer != NUMBERS[1]]
    turns += questions.choose(rng, several if several and chance(rng, 0.8) else counts, 1)
    turns += questions.choose(rng, questions.parts(rng, picture), 1)
    turns += questions.choose(rng, questions.sides(rng, picture), 1)
    looks = questions.colour(rng, picture) + questions.shape(rng, picture) + questions.neighbours(rng, picture)
    turns = questions.choose(rng, looks, 3) + turns
    return Sample(images=(picture,), turns=turns)


def sentence(rng: np.random.Generator) -> Sample:
    """Questions of the other skills, to be answered in whole sentences."""
    item = pick(rng, (colour, shape_of, position, counting))(rng)
    turns = tuple(
        Turn(question=f"In a sentence: {turn.question}", answer=turn.sentence, skill="sentence") for turn in item.turns
    )
    return Sample(images=item.images, turns=turns)


def compose(
    rng: np.random.Generator,
    paper: Background,
    shapes: Sequence[Look],
    texts: Sequence[Look],
    parts: Sequence[str | None] | None = None,
) -> Scene:
    """A scene with these objects at random places, of a random size that has room for them.

    parts: for each shape, then each text, the part of the picture to be in (None: anywhere).
    """
    wanted = parts or [None] * (len(shapes) + len(texts))
    while True:
        size = picture_size(rng)
        printed = [
            unplaced_text(rng, text, ink, size, _text_height(size, len(shapes), len(texts))) for text, ink in texts
        ]
        prints = [text for text in printed if text is not None]
        if len(prints) < len(texts):
            continue
        sides = shape_sizes(rng, *size, len(shapes) + 2 * len(texts))[: len(shapes)]
        wishes = [(side, side) for side in sides] + [(text.box[2], text.box[3]) for text in prints]
        # Large objects first: they are the hardest to find room for.
        order = sorted(range(len(wishes)), key=lambda i: -wishes[i][0] * wishes[i][1])
        found = scatter(rng, size, [wishes[i] for i in order], [wanted[i] for i in order])
        if found is None:
            continue
        boxes = [found[order.index(i)] for i in range(len(wishes))]
        return _scene(rng, size, paper, shapes, prints, boxes)


def _scene(
    rng: np.random.Generator,
    size: tuple[int, int],
    paper: Background,
    shapes: Sequence[Look],
    texts: Sequence[Text],
    boxes: Sequence[Box],
) -> Scene:
    placed = [shape(rng, *looks, box) for looks, box in zip(shapes, boxes, strict=False)]
    placed += [
        Text(text=text.text, colour=text.colour, ink=text.ink, font=text.font, height=text.height, box=box)
        for text, box in zip(texts, boxes[len(shapes) :], strict=True)
    ]
    seed = int(rng.integers(2**32))
    return Scene(width=size[0], height=size[1], background=paper, objects=tuple(placed), seed=seed)


def _text_height(size: tuple[int, int], num_shapes: int, num_texts: int) -> float:
    return 0.6 * size[1] / max(1, num_texts) if num_shapes == 0 else 0.35 * size[1] / max(1, num_texts)


def _shapes(rng: np.random.Generator, paper: Background, count: int) -> list[Look]:
    """Shapes no two of which look the same; kinds and colours may repeat."""
    colours = allowed_colours(paper.paper, for_text=False)
    looks: list[Look] = []
    while len(looks) < count:
        one = pick(rng, SHAPES), pick(rng, colours)
        if one not in looks:
            looks.append(one)
    return looks


def _any_colours(rng: np.random.Generator, paper: Background, count: int) -> list[str]:
    colours = allowed_colours(paper.paper, for_text=False)
    return [pick(rng, colours) for _ in range(count)]


def _texts(rng: np.random.Generator, paper: Background, count: int, max_length: int) -> list[Look]:
    """Different random strings in different colours, as many as the background allows."""
    colours = pick_colours(rng, paper, count, for_text=True)
    return [(random_string(rng, max_length), name) for name in colours]


def random_string(rng: np.random.Generator, max_length: int) -> str:
    length = int(rng.integers(1, max_length + 1))
    return "".join(CHARACTERS[int(i)] for i in rng.integers(len(CHARACTERS), size=length))


def apart(rng: np.random.Generator, count: int) -> tuple[Scene, ...]:
    """Pictures that differ: by the kind of a shape, by colour and kind, by a text, or by everything."""
    way = pick(rng, ("kind", "look", "text", "mixed"))
    kinds = pick_some(rng, SHAPES, 4)
    if way == "look":
        kinds = [pick(rng, kinds[:2]) for _ in range(4)]
    scenes = []
    for index in range(count):
        paper = background(rng)
        colours = _any_colours(rng, paper, 2)
        shapes, texts = [(kinds[index], colours[0])], []
        if way == "text" or (way == "mixed" and chance(rng, 0.5)):
            shapes, texts = [], _texts(rng, paper, 1, 4)
        if chance(rng, 0.3):
            shapes.append((kinds[3], colours[1]))
        scenes.append(compose(rng, paper, shapes, texts))
    return tuple(scenes)


def _which_turn(rng: np.random.Generator, scenes: tuple[Scene, ...], index: int) -> Turn | None:
    """A question about one of several pictures, or None if nothing singles it out."""
    thing = _subject(scenes[index])
    if len(scenes[index].objects) == 1 and chance(rng, 0.25):
        return _what_turn(thing, questions.ORDINALS[index])
    unique = names_of(scenes, index)
    if not unique:
        return None
    name = f"the word {unique[0]}" if isinstance(thing, Text) else questions.with_article(pick(rng, unique))
    question = pick(rng, (f"Which image shows {name}?", f"In which image is {name}?"))
    if name.startswith("the word"):
        question = question.replace("In which image is", "Which image shows")
    answer = questions.ORDINALS[index]
    sentence = f"{questions.capital(answer)} image shows {name}."
    return Turn(question=question, answer=answer, skill="which", sentence=sentence)


def names_of(scenes: tuple[Scene, ...], index: int) -> list[str]:
    """What only this one of several pictures can be asked for by: its text, or the kind or look of its shape."""
    thing, called = _subject(scenes[index]), [_called(scene) for scene in scenes]
    mine = [thing.text] if isinstance(thing, Text) else [thing.kind, questions.look(thing)]
    return [name for name in mine if sum(name in names for names in called) == 1]


def _subject(scene: Scene) -> Shape | Text:
    return scene.texts[0] if scene.texts else scene.objects[0]


def _called(scene: Scene) -> set[str]:
    """Everything that a picture can be asked for by."""
    names = {text.text for text in scene.texts}
    return names | {shape.kind for shape in scene.shapes} | {questions.look(shape) for shape in scene.shapes}


def _what_turn(thing: Shape | Text, ordinal: str) -> Turn:
    if isinstance(thing, Text):
        question, answer, says = f"What is written in {ordinal} image?", thing.text, "says"
    else:
        question, says = f"What is in {ordinal} image?", "shows"
        answer = questions.with_article(questions.look(thing))
    sentence = f"{questions.capital(ordinal)} image {says} {answer}."
    return Turn(question=question, answer=answer, skill="which", sentence=sentence)
