"""Drawing of the exercises: fonts, pictures, and the labels of what each cell shows."""

import hashlib
from itertools import islice

import numpy as np
import pytest

from deepspan.skills.fonts import CHARACTERS, FONTS, print_text
from deepspan.skills.labels import CHARACTER_CLASSES, COLOUR_CLASSES, SHAPE_CLASSES, cell_labels
from deepspan.skills.pictures import COLOURS, Background, Scene, Shape, Text, draw
from deepspan.skills.placing import view_scale
from deepspan.skills.suite import TRAIN_SEED, sample


def _digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def _scene(*objects, width=200, height=150, noise=0):
    background = Background(paper=(255, 255, 255), style="plain", noise=noise)
    return Scene(width=width, height=height, background=background, objects=objects, seed=7)


def _shape(kind, colour, box):
    return Shape(kind=kind, colour=colour, ink=COLOURS[colour], box=box)


def _text(text, left, top, font="pixel", height=21):
    mask = print_text(text, font, height).mask
    box = (left, top, left + mask.width, top + mask.height)
    return Text(text=text, colour="black", ink=COLOURS["black"], font=font, height=height, box=box)


def _labels(scene, width, height):
    """Labels of a scene resized to fill a canvas."""
    return cell_labels(
        scene,
        canvas_width=width,
        canvas_height=height,
        content_left=0,
        content_top=0,
        content_width=width,
        content_height=height,
    )


# Fonts.


@pytest.mark.parametrize("font", FONTS)
def test_print_text_every_font_draws_all_characters_differently(font):
    masks = {print_text(character, font, 44).mask.tobytes() for character in CHARACTERS}
    assert len(masks) == len(CHARACTERS)


@pytest.mark.parametrize("font", FONTS)
@pytest.mark.parametrize("height", [20, 43, 90])
def test_print_text_height_is_at_least_the_wished_one_or_close(font, height):
    printed = print_text("HK4", font, height)
    assert 0.9 * height <= printed.mask.height <= 1.1 * height + 8
    assert printed.edges[0] == 0
    assert printed.edges[-1] == printed.mask.width
    assert list(printed.edges) == sorted(set(printed.edges))


def test_print_text_edges_separate_the_characters():
    printed = print_text("HH", "pixel", 21)
    ink = np.asarray(printed.mask).any(axis=0)
    left, right = ink[: printed.edges[1]], ink[printed.edges[1] :]
    assert left.sum() == right.sum() == 15


def test_print_text_empty_raises():
    with pytest.raises(ValueError, match="no text"):
        print_text("", "pixel", 20)


def test_print_text_pixel_font_is_stable():
    assert _digest(print_text(CHARACTERS, "pixel", 14).mask.tobytes()) == "632943f58b35e29c"


# Pictures.


def test_draw_puts_ink_into_boxes_only():
    scene = _scene(_shape("circle", "red", (20, 30, 70, 80)), _text("K7", 100, 60))
    touched = (np.asarray(draw(scene)) != 255).any(axis=2)
    inside = np.zeros_like(touched)
    for left, top, right, bottom in (thing.box for thing in scene.objects):
        inside[top:bottom, left:right] = True
        box = touched[top:bottom, left:right]
        assert box[0].any()
        assert box[-1].any()
        assert box[:, 0].any()
        assert box[:, -1].any()
    assert not (touched & ~inside).any()


def test_draw_noise_stays_within_its_strength():
    box = (20, 30, 70, 80)
    quiet, noisy = (draw(_scene(_shape("square", "blue", box), noise=noise)) for noise in (0, 5))
    change = np.abs(np.asarray(quiet).astype(int) - np.asarray(noisy))
    assert 0 < change.max() <= 5


# Labels.


def test_cell_labels_canvas_of_the_same_size_label_the_boxes():
    scene = _scene(_shape("star", "blue", (42, 42, 126, 84)), width=210, height=126)
    labels = _labels(scene, 210, 126)
    expected = np.zeros((3, 5), dtype=int)
    expected[1, 1:3] = 1
    assert (labels.shape == expected * SHAPE_CLASSES.index("star")).all()
    assert (labels.colour == expected * COLOUR_CLASSES.index("blue")).all()
    assert not labels.character.any()
    assert np.argwhere(labels.centre).tolist() == [[1, 2]]


def test_cell_labels_letterboxed_canvas_moves_and_scales_the_boxes():
    scene = _scene(_shape("cross", "red", (21, 21, 42, 42)), width=63, height=42)
    labels = cell_labels(
        scene,
        canvas_width=130,
        canvas_height=126,
        content_left=2,
        content_top=21,
        content_width=126,
        content_height=84,
    )
    assert labels.shape.shape == (3, 4)
    assert np.argwhere(labels.shape).tolist() == [[1, 1]]


def test_cell_labels_text_labels_each_character():
    text = _text("K7", 0, 0, height=70)
    width, height = text.box[2], text.box[3]
    labels = _labels(_scene(text, width=width, height=height), 2 * width, 2 * height)
    edge = 2 * print_text("K7", "pixel", 70).edges[1]
    places = (np.arange(labels.character.shape[2]) + np.array([[1 / 6], [1 / 2], [5 / 6]])) * 42
    for column in range(3):
        inside = places[column] < 2 * width
        letters = [CHARACTER_CLASSES.index("K" if place < edge else "7") for place in places[column, inside]]
        assert (labels.character[column, 0, inside] == letters).all()
    inside = places[1] < 2 * width
    assert (labels.shape[0, inside] == SHAPE_CLASSES.index("text")).all()


def test_cell_labels_every_shape_of_small_pictures_is_seen():
    scenes = (scene for index in range(100) for scene in sample(TRAIN_SEED, index, "counting").images)
    for scene in islice((scene for scene in scenes if scene.width * scene.height < 384 * 384), 40):
        scale = view_scale(scene.width, scene.height)
        width, height = round(scene.width * scale), round(scene.height * scale)
        labels = _labels(scene, width, height)
        kinds = {SHAPE_CLASSES[index] for index in np.unique(labels.shape)}
        assert kinds == {"none"} | {shape.kind for shape in scene.shapes}
