"""From the bytes of a picture to RGB: formats, limits, and what transparency, rotation and deep pixels mean.

Owns every decision about a decoded pixel before resizing. Invariants: size limits are checked on the header, before
memory for pixels is taken; a picture that cannot be read whole is refused, never patched up; the pixels of a caller's
image are not changed.

Two modes. "serving" shows the model what a person sees: EXIF rotation applied, transparency on white, 16-bit grey
scaled. "reference" is the release bit for bit: `convert("RGB")` and nothing else (alpha dropped, rotation ignored,
16-bit grey saturated). Both give the same for plain RGB. Called by `image.prepare`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from deepspan.errors import ImageError
from deepspan.image.quiet import quiet_pillow

ImageMode = Literal["serving", "reference"]
ImageSource = bytes | str | os.PathLike[str] | Image.Image

SERVED_FORMATS = ("JPEG", "PNG", "GIF", "WEBP")
SERVED_FORMATS_TEXT = "JPEG, PNG, GIF or WebP"

WHITE = 255
DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
# Grey PNGs of few bits: Pillow scales the pixels to 0..255 but leaves the transparent grey level as stored.
KEY_SCALE_OF_RAW_MODE = {"L;2": 255 // 3, "L;4": 255 // 15}

# EXIF orientation -> how the stored array [H, W, 3] becomes upright.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one image may cost. Bytes of the file, pixels per side, pixels in all."""

    max_bytes: int = 32 * 2**20
    max_side: int = 8192
    max_pixels: int = 64 * 2**20


DEFAULT_LIMITS = ImageLimits()


def decode_image(source: ImageSource, *, mode: ImageMode, limits: ImageLimits = DEFAULT_LIMITS) -> np.ndarray:
    """Decode `source` to uint8 [H, W, 3], RGB. Animations give their first frame.

    source: contents of a file, a path, or a Pillow image (any format; its current frame; `max_bytes` does not apply).

    Raises ImageError if the source cannot be read, is no served format, is over a limit, or is broken anywhere.
    """
    assert mode in get_args(ImageMode), mode
    with quiet_pillow():
        if isinstance(source, Image.Image):
            _check_size(source.size, limits)
            return _pixels(source, mode)
        data = source if isinstance(source, bytes) else _read_file(source, limits)
        with _open(data, limits) as image:
            return _pixels(image, mode)


def _read_file(path: str | os.PathLike[str], limits: ImageLimits) -> bytes:
    try:
        file = Path(path)
        if not file.is_file():
            raise ImageError(f"no image file at {file}")
        with file.open("rb") as stream:
            # One byte more than allowed tells "too long" without reading the rest.
            return stream.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"the image file cannot be read: {type(error).__name__}") from error


def _open(data: bytes, limits: ImageLimits) -> Image.Image:
    """Read the header of an encoded image and check the limits; pixels are not decoded."""
    if not data:
        raise ImageError(f"the image is empty, expected {SERVED_FORMATS_TEXT} data")
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has more than {limits.max_bytes} bytes")
    try:
        image = Image.open(BytesIO(data), formats=SERVED_FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"the image is not {SERVED_FORMATS_TEXT}, or its header is broken") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"the image has more than {limits.max_pixels} pixels") from error
    except MemoryError:
        raise
    except Exception as error:  # a hostile header raises nearly anything inside Pillow's parsers
        raise _broken(error) from error
    _check_size(image.size, limits)
    return image


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the image has no pixels: {width} x {height}")
    if max(size) > limits.max_side:
        raise ImageError(f"the image has {width} x {height} pixels, the longest side served is {limits.max_side}")
    if width * height > limits.max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, at most {limits.max_pixels} are served")


def _pixels(image: Image.Image, mode: ImageMode) -> np.ndarray:
    """Decode and convert to uint8 [H, W, 3]."""
    try:
        # The depth of the stored pixels is known only until they are decoded.
        raw_mode = _raw_mode(image)
        image.load()
        if mode == "reference":
            return np.asarray(image.convert("RGB"))
        rgb = _visible_rgb(image, raw_mode)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # as in _open; a broken file must fail its own request and nothing else
        raise _broken(error) from error
    upright = UPRIGHT.get(_orientation(image))
    return np.ascontiguousarray(upright(rgb)) if upright else rgb


def _broken(error: Exception) -> ImageError:
    # Only the kind of error: Pillow's texts quote data and addresses.
    return ImageError(
        f"the image cannot be decoded to RGB, its data is truncated or broken ({type(error).__name__}); "
        f"served are {SERVED_FORMATS_TEXT}"
    )


def _raw_mode(image: Image.Image) -> str | None:
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else None
    return arguments if isinstance(arguments, str) else None


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # unreadable metadata says nothing about rotation, and viewers show such pictures as stored
        return 1


def _visible_rgb(image: Image.Image, raw_mode: str | None) -> np.ndarray:
    """Pixels as a person sees them, before rotation: uint8 [H, W, 3]."""
    if image.mode in DEEP_GREY_MODES:
        return _deep_grey(image)
    if image.mode == "F":
        return _unit_float(image)
    key = image.info.get("transparency")
    if image.mode in ("1", "L", "RGB"):
        rgb = np.asarray(image.convert("RGB"))
        return rgb if key is None else _key_to_white(rgb, key, raw_mode)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    rgba = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, (WHITE, WHITE, WHITE))
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return np.asarray(canvas)


def _key_to_white(rgb: np.ndarray, key: int | tuple[int, ...], raw_mode: str | None) -> np.ndarray:
    """White where pixels equal the one transparent colour of the file; `key` as Pillow hands it over."""
    color = np.asarray(key, dtype=np.int64) * KEY_SCALE_OF_RAW_MODE.get(raw_mode or "", 1)
    if raw_mode == "RGB;16B":
        color = color >> 8  # of 16-bit colours only the high bytes were decoded
    if color.max() > 255:
        return rgb  # no pixel can have it
    transparent = (rgb == color.astype(np.uint8)).all(axis=-1, keepdims=True)
    return np.where(transparent, np.uint8(WHITE), rgb)


def _deep_grey(image: Image.Image) -> np.ndarray:
    """16-bit grey to 8 bits, rounded to nearest: 65535 / 255 = 257."""
    grey = np.asarray(image).astype(np.int32)
    if grey.min() < 0 or grey.max() > 65535:
        raise ImageError(f"grey levels must lie in 0..65535, found {grey.min()}..{grey.max()}")
    scaled = ((grey + 128) // 257).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        scaled[grey == key] = WHITE
    return np.repeat(scaled[:, :, None], 3, axis=2)


def _unit_float(image: Image.Image) -> np.ndarray:
    """Float grey of 0..1 to 8 bits; there is no other range that could be told from the values."""
    grey = np.asarray(image)
    if not (grey.min() >= 0 and grey.max() <= 1):  # written so that NaN is refused too
        raise ImageError(f"float pixels must lie in 0..1, found {grey.min()}..{grey.max()}")
    scaled = np.rint(grey * np.float32(255)).astype(np.uint8)
    return np.repeat(scaled[:, :, None], 3, axis=2)
