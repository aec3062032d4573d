"""The generated exercises: the same on every run, and with answers that follow from what is drawn."""

import hashlib
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from deepspan.skills.fonts import CHARACTERS, FONTS
from deepspan.skills.pictures import COLOURS, SHAPES, Text, allowed_colours, draw
from deepspan.skills.placing import MAX_AREA, MAX_SIDE, MIN_SHAPE, MIN_TEXT, PARTS, view_scale
from deepspan.skills.questions import NUMBERS, ORDINALS
from deepspan.skills.suite import (
    EVAL_SEED,
    PICTURE_SKILLS,
    RECALL_DISTANCES,
    SKILLS,
    TEXT_SKILLS,
    TRAIN_SEED,
    WEIGHTS,
    sample,
    vocabulary_text,
)
from deepspan.skills.text_tasks import approximate_tokens


def _samples(skill, count=60, seed=TRAIN_SEED):
    return [sample(seed, index, skill) for index in range(count)]


def _digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


# Determinism.


@pytest.mark.parametrize("skill", SKILLS)
def test_sample_same_seed_and_index_gives_the_same(skill):
    first, second = sample(EVAL_SEED, 3, skill), sample(EVAL_SEED, 3, skill)
    assert first == second
    assert [draw(scene).tobytes() for scene in first.images] == [draw(scene).tobytes() for scene in second.images]


def test_sample_text_questions_are_stable():
    skills = [skill for skill in TEXT_SKILLS if skill != "series"]
    turns = [turn for skill in skills for turn in sample(TRAIN_SEED, 0, skill).turns]
    assert _digest("\n".join(turn.question + turn.answer for turn in turns).encode()) == "766f0605403aef9f"


def test_sample_pictures_and_their_questions_are_stable():
    samples = _samples("counting", 8)
    turns = [turn for one in samples for turn in one.turns]
    assert _digest("\n".join(turn.question + turn.answer for turn in turns).encode()) == "c12e6c27ede4b81b"
    pixels = b"".join(draw(scene).tobytes() for one in samples for scene in one.images)
    assert _digest(pixels) == "93f54171239290c2"


@pytest.mark.parametrize("skill", SKILLS)
def test_sample_training_and_evaluation_differ(skill):
    count = 40 if skill not in RECALL_DISTANCES else 5
    assert not set(_samples(skill, count, TRAIN_SEED)) & set(_samples(skill, count, EVAL_SEED))


def test_sample_unknown_skill_raises():
    with pytest.raises(KeyError):
        sample(TRAIN_SEED, 0, "singing")


def test_sample_no_skill_draws_all_weighted_skills():
    seen = {turn.skill for index in range(300) for turn in sample(TRAIN_SEED, index).turns}
    assert seen == set(WEIGHTS) - {"scene"}


def test_sample_only_keeps_one_turn():
    one = sample(TRAIN_SEED, 0, "scene")
    assert one.only(1).turns == (one.turns[1],)
    assert one.only(1).images == one.images


# Pictures.


@pytest.mark.parametrize("skill", PICTURE_SKILLS)
def test_scene_objects_lie_inside_and_apart(skill):
    for scene in (scene for one in _samples(skill) for scene in one.images):
        assert max(scene.width, scene.height) <= MAX_SIDE
        assert scene.width * scene.height <= MAX_AREA + MAX_SIDE
        for left, top, right, bottom in (thing.box for thing in scene.objects):
            assert 0 < left < right < scene.width
            assert 0 < top < bottom < scene.height
        for first, second in combinations((thing.box for thing in scene.objects), 2):
            beside = first[2] < second[0] or second[2] < first[0]
            assert beside or first[3] < second[1] or second[3] < first[1]


@pytest.mark.parametrize("skill", PICTURE_SKILLS)
def test_scene_objects_are_large_and_stand_out(skill):
    for scene in (scene for one in _samples(skill) for scene in one.images):
        scale = view_scale(scene.width, scene.height)
        for thing in scene.objects:
            for_text = isinstance(thing, Text)
            low = 0.9 * MIN_TEXT if for_text else MIN_SHAPE
            assert (thing.box[3] - thing.box[1]) * scale >= low
            assert thing.colour in allowed_colours(scene.background.paper, for_text=for_text)


def test_picture_sizes_cover_all_aspects_and_stay_small():
    scenes = [scene for one in _samples("colour", 600) for scene in one.images]
    aspects = [scene.width / scene.height for scene in scenes]
    areas = [scene.width * scene.height for scene in scenes]
    assert min(aspects) < 1 / 4
    assert max(aspects) > 4
    assert np.mean([1 / 1.8 <= aspect <= 1.8 for aspect in aspects]) > 0.6
    assert np.mean([area <= 384 * 384 for area in areas]) > 0.75
    assert max(areas) > 300_000


# Answers, computed again from the objects.


def _named(scene, name):
    """Objects that "the red star", "the star" or "the text" may mean."""
    if name == "the text":
        return list(scene.texts)
    *colour, kind = name.removeprefix("the ").split()
    return [shape for shape in scene.shapes if shape.kind == kind and colour in ([], [shape.colour])]


def _the(scene, name):
    (found,) = _named(scene, name)
    return found


def _centre(thing):
    left, top, right, bottom = thing.box
    return (left + right) / 2, (top + bottom) / 2


def _side_of(first, second, axis):
    return ("left", "right", "above", "below")[2 * axis + int(_centre(first)[axis] > _centre(second)[axis])]


def _described(scene, answer):
    return _the(scene, answer.removeprefix("an ").removeprefix("a "))


def _answer_looks(scene, question):
    if found := re.fullmatch(r"(?:What colour is|Which colour does) (the \w+)(?: have)?\?", question):
        return _the(scene, found[1]).colour
    if found := re.fullmatch(r"(?:What|Which) shape is (\w+)\?", question):
        (kind,) = [shape.kind for shape in scene.shapes if shape.colour == found[1]]
        return kind
    if re.fullmatch(r"What is in the picture\?|What does the picture show\?", question):
        (shape,) = scene.objects
        return f"{'an' if shape.colour == 'orange' else 'a'} {shape.colour} {shape.kind}"
    return None


def _answer_reading_and_counting(scene, question):
    if re.fullmatch(r"What does the text say\?|What is written in the picture\?", question):
        (text,) = scene.texts
        return text.text
    if found := re.fullmatch(r"What does the (\w+) text say\?", question):
        (text,) = [text.text for text in scene.texts if text.colour == found[1]]
        return text
    if found := re.fullmatch(r"How many (?:(\w+) shapes|(\w+)) (?:are there|do you see)\?", question):
        colour, kinds = found.groups()
        kind = None if kinds in (None, "shapes") else kinds.removesuffix("es" if kinds == "crosses" else "s")
        return NUMBERS[
            sum(shape.colour == (colour or shape.colour) and kind in (None, shape.kind) for shape in scene.shapes)
        ]
    return None


def _answer_position(scene, question, answer):
    if found := re.fullmatch(r"(?:Where|In which part of the picture) is (the .*)\?", question):
        x, y = _centre(_the(scene, found[1]))
        return PARTS[int(3 * x / scene.width) + 3 * int(3 * y / scene.height)]
    if found := re.fullmatch(r"Is (the .*) (left or right of|above or below) (the .*)\?", question):
        return _side_of(_the(scene, found[1]), _the(scene, found[3]), int(found[2].startswith("above")))
    if found := re.fullmatch(r"What is (?:to the )?(left|right|above|below)(?: of)? (the .*)\?", question):
        axis = int(found[1] in ("above", "below"))
        here = _the(scene, found[2])
        (there,) = [
            thing
            for thing in scene.objects
            if thing is not here
            and _side_of(thing, here, axis) == found[1]
            and _centre(thing)[axis] != _centre(here)[axis]
        ]
        assert there is _described(scene, answer)
        return answer
    return None


def _answer_again(scene, turn):
    return (
        _answer_looks(scene, turn.question)
        or _answer_reading_and_counting(scene, turn.question)
        or _answer_position(scene, turn.question, turn.answer)
    )


@pytest.mark.parametrize("skill", sorted(set(PICTURE_SKILLS) - {"which", "sentence"}))
def test_turns_answers_follow_from_the_scene(skill):
    for one in _samples(skill, 200):
        assert one.turns
        assert len({turn.question for turn in one.turns}) == len(one.turns)
        (scene,) = one.images
        for turn in one.turns:
            assert _answer_again(scene, turn) == turn.answer, turn


SENTENCES = (  # question, the sentence that its short answer makes; numbers are groups of the question
    (r"(?:What colour is|Which colour does) (the .*?)(?: have)?\?", r"\1 is {}."),
    (r"(?:What|Which) shape is (\w+)\?", r"the \1 shape is a {}."),
    (r"What is in the picture\?|What does the picture show\?", r"the picture shows {}."),
    (r"How many (.*) (?:are there|do you see)\?", r"there are {} \1 in the picture."),
    (r"(?:Where|In which part of the picture) is (.*)\?", r"\1 is in the {} part of the picture."),
    (r"Is (.*) left or right of (.*)\?", r"\1 is to the {} of \2."),
    (r"Is (.*) above or below (.*)\?", r"\1 is {} \2."),
    (r"What is (to the left of|to the right of|above|below) (.*)\?", r"{} is \1 \2."),
)


def _as_sentence(question, answer):
    (made,) = [found.expand(form) for pattern, form in SENTENCES if (found := re.fullmatch(pattern, question))]
    made = made.format(answer)
    if made.startswith("there are one "):  # of the things named, one
        made = re.sub("are one (.*?)s? in", lambda found: f"is one {found[1].replace('crosse', 'cross')} in", made)
    return made[0].upper() + made[1:]


def test_sentence_says_what_the_short_answer_says():
    for one in _samples("sentence", 300):
        assert one.turns
        (scene,) = one.images
        for turn in one.turns:
            start, question = turn.question.split(": ")
            assert start == "In a sentence"
            # Names in the answer of a question about a neighbour are checked with that skill.
            if found := re.match(r"(An? .*?) is (?:to|above|below)", turn.answer):
                short = found[1][0].lower() + found[1][1:]
                assert _answer_position(scene, question, short) == short
            else:
                short = _answer_again(scene, replace(turn, question=question))
            assert _as_sentence(question, short) == turn.answer


def test_which_answers_follow_from_the_scenes():
    for one in _samples("which", 200):
        assert len(one.images) in (2, 3)
        for turn in one.turns:
            if found := re.fullmatch(r"What is (in|written in) (the \w+) image\?", turn.question):
                scene = one.images[ORDINALS.index(found[2])]
                (thing,) = scene.objects
                assert turn.answer == thing.text if found[1] == "written in" else _described(scene, turn.answer)
                continue
            found = re.fullmatch(
                r"(?:Which image shows|In which image is) (?:the word (\w+)|an? (.*))\?", turn.question
            )
            holds = [
                any(text.text == found[1] for text in scene.texts) if found[1] else bool(_named(scene, found[2]))
                for scene in one.images
            ]
            assert [ORDINALS[index] for index, held in enumerate(holds) if held] == [turn.answer]


@pytest.mark.parametrize(
    ("skill", "expected"),
    [
        ("colour", set(COLOURS)),
        ("shape", set(SHAPES)),
        ("position", {*PARTS, "above", "below"}),
        ("counting", set(NUMBERS[1:])),
        ("which", set(ORDINALS)),
    ],
)
def test_turns_answers_cover_everything_without_a_favourite(skill, expected):
    answers = Counter(turn.answer for one in _samples(skill, 400) for turn in one.turns)
    total = sum(answers[answer] for answer in expected)
    assert all(answers[answer] >= 0.03 * total for answer in expected)
    assert answers.most_common(1)[0][1] < 0.5 * total


def test_reading_covers_all_characters_lengths_and_fonts():
    texts = [text for one in _samples("reading", 400) for scene in one.images for text in scene.texts]
    assert set("".join(text.text for text in texts)) == set(CHARACTERS)
    assert {len(text.text) for text in texts} == set(range(1, 7))
    assert {text.font for text in texts} == set(FONTS)


# Text exercises.


def test_repeat_answer_is_what_was_given():
    for turn in (turn for one in _samples("repeat") for turn in one.turns):
        assert turn.question.split(": ", 1)[1] == turn.answer


def test_lookup_answer_is_the_entry_of_the_key():
    for one in _samples("lookup"):
        pairs = dict(re.findall(r"(\w+): (\w+)", one.turns[0].question))
        for turn in one.turns:
            key = re.search(r"(?:list give for|Look up) (\w+)[?.]$", turn.question)[1]
            assert pairs[key] == turn.answer


def test_series_names_everything_between_its_ends_once():
    seen = set()
    for turn in (turn for one in _samples("series", 100) for turn in one.turns):
        noun, first, last = re.search(r"(numbers|letters) from (\w+) to (\w+)\.$", turn.question).groups()
        place = int if noun == "numbers" else ord
        said = [place(thing) for thing in turn.answer.split(", ")]
        step = 1 if place(last) > place(first) else -1
        assert said == list(range(place(first), place(last) + step, step))
        seen.add((noun, step))
    assert len(seen) == 4


def test_adding_answer_is_the_sum():
    for turn in (turn for one in _samples("adding") for turn in one.turns):
        first, second = (int(number) for number in re.findall(r"\d+", turn.question))
        assert max(first, second) < 50
        assert first + second == int(turn.answer)


@pytest.mark.parametrize("skill", ["recall", *RECALL_DISTANCES])
def test_recall_answer_is_stated_once_at_the_distance(skill):
    for one in _samples(skill, 8):
        story, question = re.fullmatch(r"(.*\.) (What is the .*\?)", one.turns[0].question).groups()
        questions = [question, *(turn.question for turn in one.turns[1:])]
        for index, (asked, turn) in enumerate(zip(questions, one.turns, strict=True)):
            key = asked.removeprefix("What is ").removesuffix("?").replace("the ", "The ", 1)
            (found,) = re.finditer(rf"{key} is (\w+)\.", story)
            assert found[1] == turn.answer
            distance = approximate_tokens(story[found.end() :])
            if index == 0 and skill in RECALL_DISTANCES:
                assert RECALL_DISTANCES[skill] <= distance <= RECALL_DISTANCES[skill] + 20


def test_vocabulary_text_holds_the_words_of_all_skills():
    words = set(re.findall(r"[A-Za-z]+", vocabulary_text(400)))
    assert {"colour", "circles", "centre", "third", "plus", "farmer", "Repeat", "code", *CHARACTERS[:24]} <= words
    assert not re.search(r"[A-Z0-9]{2}", vocabulary_text(50))
