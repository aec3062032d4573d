"""Printing short strings in several fonts, without any font of the system.

Owns how a string becomes a mask: the outline font bundled with Pillow (plain, bold, slanted), Pillow's old bitmap font,
and the two fonts of `skills.glyphs` (dots as blocks or as beads, strokes thin or thick). Invariants: a mask is cropped
to its ink and the boxes of its characters tile its width, so that a pixel belongs to exactly one character. Glyphs and
strings are cached, so masks must not be changed by callers. Called by `skills.pictures` and `skills.placing`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from deepspan.skills import glyphs

CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"  # no O and no I: they look like 0 and 1
SUPERSAMPLE = 3
_OUTLINE_CAP = 0.69  # height of a capital of the bundled outline font, as a part of the font size
_BITMAP_ROWS = (2, 10)  # rows of Pillow's bitmap font that capitals and digits use


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """A printed string. mask: mode "L", ink 255. edges: left edge of each character, then the width; pixels."""

    mask: Image.Image
    edges: tuple[int, ...]


@lru_cache(maxsize=512)
def print_text(text: str, font: str, height: int) -> Print:
    """Print `text` with capitals `height` pixels high, or a few pixels more where a font has whole dots.

    text: characters of A-Z and 0-9. font: one of `FONTS`. Raises KeyError for others, ValueError if `text` is empty.
    """
    if not text:
        raise ValueError("there is no text to print")
    parts = [_glyph(character, font, height) for character in text]
    gap = max(1, round(0.17 * height))
    width = sum(part.width for part in parts) + gap * (len(parts) - 1)
    mask = Image.new("L", (width, parts[0].height))
    edges, left = [0], 0
    for part in parts:
        mask.paste(part, (left, 0))
        left += part.width + gap
        edges.append(left - (gap + 1) // 2)
    edges[-1] = width
    _, top, _, bottom = mask.getbbox() or (0, 0, width, mask.height)
    return Print(mask=mask.crop((0, top, width, bottom)), edges=tuple(edges))


@lru_cache(maxsize=8192)
def _glyph(character: str, font: str, height: int) -> Image.Image:
    """Mask of one character, cropped to its ink at the left and right; all of a font and height are equally high."""
    mask = FONTS[font](character, height)
    left, _, right, _ = mask.getbbox() or (0, 0, mask.width, mask.height)
    return mask.crop((left, 0, right, mask.height))


@lru_cache(maxsize=256)
def _outline_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _outline(character: str, height: int, stroke: int) -> Image.Image:
    """A character of the bundled outline font on a line with room for the tail of a Q."""
    font = _outline_font(max(1, round((height - 2 * stroke) / _OUTLINE_CAP)))
    room = 2 * stroke + max(2, height // 5)
    mask = Image.new("L", (2 * height, height + 2 * room))
    position = (height // 2, height - stroke + room)
    ImageDraw.Draw(mask).text(position, character, fill=255, font=font, anchor="ls", stroke_width=stroke)
    return mask


def _sans(character: str, height: int) -> Image.Image:
    return _outline(character, height, 0)


def _sans_bold(character: str, height: int) -> Image.Image:
    return _outline(character, height, max(1, round(height / 22)))


def _sans_slanted(character: str, height: int) -> Image.Image:
    upright = _outline(character, height, 0)
    lean = 0.22
    shear = (1, lean, -lean * upright.height / 2, 0, 1, 0)
    return upright.transform(upright.size, Image.Transform.AFFINE, shear, Image.Resampling.BILINEAR)


@lru_cache(maxsize=1)
def _bitmap_font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


def _bitmap(character: str, height: int) -> Image.Image:
    small = Image.new("L", (8, 12))
    ImageDraw.Draw(small).text((1, 0), character, fill=255, font=_bitmap_font())
    top, bottom = _BITMAP_ROWS
    factor = -(-height // (bottom - top - 1))
    return _enlarged(small.crop((0, top, small.width, bottom)), factor)


def _pixel(character: str, height: int) -> Image.Image:
    return _enlarged(_dot_image(character), -(-height // glyphs.DOT_ROWS))


def _beads(character: str, height: int) -> Image.Image:
    """The dots of a character as separate round beads."""
    pitch = SUPERSAMPLE * -(-height // glyphs.DOT_ROWS)
    large = Image.new("L", (glyphs.DOT_COLUMNS * pitch, glyphs.DOT_ROWS * pitch))
    draw = ImageDraw.Draw(large)
    for row, line in enumerate(glyphs.dots(character)):
        for column, dot in enumerate(line):
            if dot:
                draw.ellipse((column * pitch, row * pitch, (column + 1) * pitch - 1, (row + 1) * pitch - 1), fill=255)
    return large.reduce(SUPERSAMPLE)


def _dot_image(character: str) -> Image.Image:
    image = Image.new("L", (glyphs.DOT_COLUMNS, glyphs.DOT_ROWS))
    image.putdata([255 * dot for row in glyphs.dots(character) for dot in row])
    return image


def _enlarged(image: Image.Image, factor: int) -> Image.Image:
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _pen(character: str, height: int, thickness: float) -> Image.Image:
    """The strokes of a character, drawn with a round pen. thickness: diameter of the pen as a part of the height."""
    large = SUPERSAMPLE * height
    radius = max(SUPERSAMPLE / 2, thickness * large / 2)
    step = (large - 2 * radius) / glyphs.STROKE_ROWS
    mask = Image.new("L", (SUPERSAMPLE * height, large))
    draw = ImageDraw.Draw(mask)
    for path in glyphs.strokes(character):
        points = [(radius + column * step, radius + row * step) for column, row in path]
        draw.line(points, fill=255, width=max(1, round(2 * radius)))
        for x, y in points:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return mask.reduce(SUPERSAMPLE)


def _thin_pen(character: str, height: int) -> Image.Image:
    return _pen(character, height, 0.11)


def _thick_pen(character: str, height: int) -> Image.Image:
    return _pen(character, height, 0.2)


FONTS: dict[str, Callable[[str, int], Image.Image]] = {
    "sans": _sans,
    "sans_bold": _sans_bold,
    "sans_slanted": _sans_slanted,
    "bitmap": _bitmap,
    "pixel": _pixel,
    "beads": _beads,
    "thin_pen": _thin_pen,
    "thick_pen": _thick_pen,
}
