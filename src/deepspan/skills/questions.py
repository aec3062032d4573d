"""Questions that a scene answers without doubt.

Owns the rules of when a question is fair: names must single out one object, and relations must be clear to a person.
Every function lists all fair questions of one kind about a scene; `choose` picks some so that no answer was given away
by an earlier turn. Called by `skills.tasks`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspan.skills.pictures import Scene, Shape, Text
from deepspan.skills.placing import chance, part_of, pick
from deepspan.skills.records import Turn

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
ORDINALS = ("the first", "the second", "the third")
SIDES = ("left", "right", "above", "below")
_TOWARDS = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A fair question. topic: questions about the same thing share it.

    asks: index of the object whose look (colour and shape) is the answer, or None. tells: indices of the objects whose
    look the question or its answer gives away.
    """

    turn: Turn
    topic: tuple[str | int, ...]
    asks: int | None
    tells: frozenset[int]


def choose(rng: np.random.Generator, questions: Sequence[Question], count: int) -> tuple[Turn, ...]:
    """Up to `count` turns in random order, each topic once, none answered by an earlier one."""
    topics: set[tuple[str | int, ...]] = set()
    told: set[int] = set()
    turns: list[Turn] = []
    for index in rng.permutation(len(questions)):
        question = questions[int(index)]
        if len(turns) == count:
            break
        if question.topic in topics or question.asks in told:
            continue
        topics.add(question.topic)
        told |= question.tells
        turns.append(question.turn)
    return tuple(turns)


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def look(shape: Shape) -> str:
    return f"{shape.colour} {shape.kind}"


def reading(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """What is written; with several texts, each is singled out by its colour."""
    colours = Counter(text.colour for text in scene.texts)
    questions = []
    for index, thing in enumerate(scene.objects):
        if not isinstance(thing, Text):
            continue
        if len(scene.texts) == 1:
            question = pick(rng, ("What does the text say?", "What is written in the picture?"))
        elif colours[thing.colour] == 1:
            question = f"What does the {thing.colour} text say?"
        else:
            continue
        whose = "The text" if len(scene.texts) == 1 else f"The {thing.colour} text"
        questions.append(_question(question, thing.text, "reading", index, sentence=f"{whose} says {thing.text}."))
    return questions


def colour(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """The colour of a shape that is the only one of its kind, or of the only text."""
    kinds = Counter(shape.kind for shape in scene.shapes)
    questions = []
    for index, thing in enumerate(scene.objects):
        if isinstance(thing, Shape) and kinds[thing.kind] == 1:
            question = pick(rng, (f"What colour is the {thing.kind}?", f"Which colour does the {thing.kind} have?"))
        elif isinstance(thing, Text) and len(scene.texts) == 1:
            question = "What colour is the text?"
        else:
            continue
        sentence = f"The {thing.kind if isinstance(thing, Shape) else 'text'} is {thing.colour}."
        questions.append(_question(question, thing.colour, "colour", index, look_of=index, sentence=sentence))
    return questions


def shape(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """The kind of a shape that is the only one of its colour, or all about a single shape."""
    colours = Counter(shape.colour for shape in scene.shapes)
    questions = []
    for index, thing in enumerate(scene.objects):
        if not isinstance(thing, Shape):
            continue
        if len(scene.objects) == 1 and chance(rng, 0.6):
            question = pick(rng, ("What is in the picture?", "What does the picture show?"))
            answer = with_article(look(thing))
            sentence = f"The picture shows {answer}."
        elif colours[thing.colour] == 1:
            question, answer = pick(rng, ("What", "Which")) + f" shape is {thing.colour}?", thing.kind
            sentence = f"The {thing.colour} shape is {with_article(answer)}."
        else:
            continue
        questions.append(_question(question, answer, "shape", index, look_of=index, sentence=sentence))
    return questions


def counting(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """How many shapes of a kind, of a colour, or at all; one to six."""
    shapes = scene.shapes
    names = Counter(shape.kind for shape in shapes)
    names.update(f"{shape.colour} shape" for shape in shapes)
    names.update("shape" for _ in shapes)
    questions = []
    for name, count in names.items():
        noun = plural(name)
        if count < len(NUMBERS):
            question = pick(rng, (f"How many {noun} are there?", f"How many {noun} do you see?"))
            some = f"are {NUMBERS[count]} {noun}" if count > 1 else f"is one {name}"
            sentence = f"There {some} in the picture."
            questions.append(_question(question, NUMBERS[count], "counting", noun, sentence=sentence))
    return questions


def parts(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """In which of nine parts of the picture an object is."""
    questions = []
    for index, thing in enumerate(scene.objects):
        name, part = _name(rng, scene, thing), part_of(scene, thing.box)
        if name is None or part is None:
            continue
        question = pick(rng, (f"Where is {name}?", f"In which part of the picture is {name}?"))
        told, sentence = _told(thing, name, index), f"{capital(name)} is in the {part} part of the picture."
        questions.append(_question(question, part, "position", "where", index, tells=told, sentence=sentence))
    return questions


def sides(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """Whether an object is left or right of another, above or below it."""
    questions = []
    for index, first in enumerate(scene.objects):
        for other, second in enumerate(scene.objects):
            if index == other:
                continue
            for axis, (low, high) in enumerate((SIDES[:2], SIDES[2:])):
                answer = _order(first, second, axis, (low, high))
                names = _name(rng, scene, first), _name(rng, scene, second)
                if answer is None or names[0] is None or names[1] is None:
                    continue
                question = f"Is {names[0]} {low} or {high}{'' if axis else ' of'} {names[1]}?"
                told = _told(first, names[0], index) | _told(second, names[1], other)
                pair = min(index, other), max(index, other)
                sentence = f"{capital(names[0])} is {_TOWARDS[answer]} {names[1]}."
                topic = ("side", *pair, axis)
                questions.append(_question(question, answer, "position", *topic, tells=told, sentence=sentence))
    return questions


def neighbours(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """What is on one side of an object, where exactly one other object is."""
    questions = []
    for index, thing in enumerate(scene.objects):
        for side in SIDES:
            name, found = _name(rng, scene, thing), _only_neighbour(scene, index, side)
            there = None if found is None else scene.objects[found]
            if name is None or not isinstance(there, Shape):
                continue
            answer = with_article(look(there))
            told = _told(thing, name, index)
            question = f"What is {_TOWARDS[side]} {name}?"
            sentence = f"{capital(answer)} is {_TOWARDS[side]} {name}."
            topic = (side, index)
            questions.append(
                _question(question, answer, "position", *topic, look_of=found, tells=told, sentence=sentence)
            )
    return questions


def _question(
    question: str,
    answer: str,
    skill: str,
    *topic: str | int,
    look_of: int | None = None,
    tells: Iterable[int] = (),
    sentence: str,
) -> Question:
    told = frozenset(tells) if look_of is None else frozenset(tells) | {look_of}
    turn = Turn(question=question, answer=answer, skill=skill, sentence=sentence)
    return Question(turn=turn, topic=(skill, *topic), asks=look_of, tells=told)


def _name(rng: np.random.Generator, scene: Scene, thing: Shape | Text) -> str | None:
    """A name that only this object of the scene has: by its kind, by colour and kind, or None."""
    if isinstance(thing, Text):
        return "the text" if len(scene.texts) == 1 else None
    if sum(shape.kind == thing.kind for shape in scene.shapes) == 1 and chance(rng, 0.6):
        return f"the {thing.kind}"
    if sum(look(shape) == look(thing) for shape in scene.shapes) == 1:
        return f"the {look(thing)}"
    return None


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _told(thing: Shape | Text, name: str, index: int) -> frozenset[int]:
    """The object itself if its name gives its colour away."""
    return frozenset({index}) if isinstance(thing, Shape) and thing.colour in name else frozenset()


def _order(first: Shape | Text, second: Shape | Text, axis: int, names: tuple[str, str]) -> str | None:
    """Name of the side of `second` on which `first` is, along one axis; None unless they are apart on it."""
    if first.box[axis + 2] <= second.box[axis]:
        return names[0]
    if second.box[axis + 2] <= first.box[axis]:
        return names[1]
    return None


def _only_neighbour(scene: Scene, index: int, side: str) -> int | None:
    """The only object whose centre is on a side of another one, if it is clearly more there than elsewhere."""
    axis = SIDES.index(side) // 2
    sign = -1 if side in ("left", "above") else 1
    here = _doubled_centre(scene.objects[index])
    found = None
    for other, thing in enumerate(scene.objects):
        there = _doubled_centre(thing)
        away = sign * (there[axis] - here[axis])
        if other == index or away <= 0:
            continue
        apart = _order(thing, scene.objects[index], axis, (SIDES[2 * axis], SIDES[2 * axis + 1])) == side
        if found is not None or not apart or abs(there[1 - axis] - here[1 - axis]) > away:
            return None
        found = other
    return found


def _doubled_centre(thing: Shape | Text) -> tuple[int, int]:
    left, top, right, bottom = thing.box
    return left + right, top + bottom
