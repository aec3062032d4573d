"""Saves sample pictures with their questions and answers as one PNG, to be looked at by a person.

Usage: python training/contact_sheet.py sheet.png --skill scene --count 12
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from deepspan.skills.pictures import draw
from deepspan.skills.records import Sample
from deepspan.skills.suite import PICTURE_SKILLS, TRAIN_SEED, sample

TILE = 300
LINE = 15
GAP = 10


def contact_sheet(samples: Sequence[Sample], columns: int = 4) -> Image.Image:
    """One picture of all samples, `columns` side by side: the drawn images, below them what is asked and answered."""
    tiles = [_tile(one) for one in samples]
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    sheet = Image.new("RGB", (columns * (TILE + GAP), sum(heights) + GAP * len(rows)), (120, 120, 120))
    top = 0
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            sheet.paste(tile, (column * (TILE + GAP), top))
        top += height + GAP
    return sheet


def _tile(one: Sample) -> Image.Image:
    pictures = [draw(scene) for scene in one.images]
    for picture in pictures:
        picture.thumbnail((TILE // len(pictures) - 2, TILE))
    picture_height = max((picture.height for picture in pictures), default=0)
    lines = [line for turn in one.turns for line in _wrapped(f"{turn.question} -> {turn.answer}")]
    tile = Image.new("RGB", (TILE, picture_height + LINE * len(lines) + 6), (250, 250, 250))
    for index, picture in enumerate(pictures):
        tile.paste(picture, (index * (TILE // len(pictures)), 0))
    pen, font = ImageDraw.Draw(tile), ImageFont.load_default(12)
    for index, line in enumerate(lines):
        pen.text((3, picture_height + 3 + LINE * index), line, fill=(0, 0, 0), font=font)
    return tile


def _wrapped(text: str, width: int = 46) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)]


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--skill", choices=sorted(PICTURE_SKILLS), default="scene")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--columns", type=int, default=4)
    options = parser.parse_args()
    samples = [sample(options.seed, index, options.skill) for index in range(options.count)]
    contact_sheet(samples, options.columns).save(options.output)


if __name__ == "__main__":
    main()
