"""Decoding: what a person sees in serving mode, the release bit for bit in reference mode."""

import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile, ImageOps

from deepspan.image.decode import decode_image

GREY, RGB, PALETTE, GREY_ALPHA = 0, 2, 3, 4  # colour types of PNG


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def raw_png(width, depth, color, row, transparency=b"", palette=b""):
    """A PNG of one row, written by hand: Pillow cannot write every depth that it reads."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0))]
    parts += [chunk(b"PLTE", palette)] if palette else []
    parts += [chunk(b"tRNS", transparency)] if transparency else []
    parts += [chunk(b"IDAT", zlib.compress(b"\0" + row)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def pixels(source, mode="serving"):
    """Pixels of the first row as a list of [r, g, b]."""
    decoded = decode_image(source, mode=mode)
    assert decoded.dtype == np.uint8
    return decoded[0].tolist()


@pytest.mark.parametrize(
    ("mode", "color", "serving", "reference"),
    [
        ("RGBA", (200, 10, 20, 0), [255, 255, 255], [200, 10, 20]),
        ("RGBA", (200, 10, 20, 128), [227, 132, 137], [200, 10, 20]),
        ("RGBA", (200, 10, 20, 255), [200, 10, 20], [200, 10, 20]),
        ("LA", (50, 0), [255, 255, 255], [50, 50, 50]),
        ("LA", (50, 255), [50, 50, 50], [50, 50, 50]),
        ("RGB", (1, 2, 3), [1, 2, 3], [1, 2, 3]),
        ("L", 50, [50, 50, 50], [50, 50, 50]),
        ("1", 1, [255, 255, 255], [255, 255, 255]),
        ("I;16", 60000, [233, 233, 233], [255, 255, 255]),
        ("I;16", 1000, [4, 4, 4], [255, 255, 255]),
    ],
)
def test_decode_of_png_mode_equals_expectation_of_each_image_mode(mode, color, serving, reference):
    data = encode(Image.new(mode, (3, 1), color))
    assert pixels(data) == [serving] * 3
    assert pixels(data, "reference") == [reference] * 3


@pytest.mark.parametrize(
    ("mode", "color", "serving"),
    [
        ("PA", (50, 0), [255, 255, 255]),
        ("RGBa", (0, 0, 0, 0), [255, 255, 255]),
        ("CMYK", (0, 255, 255, 0), [255, 0, 0]),
        ("I;16B", 60000, [233, 233, 233]),
        ("I", 60000, [233, 233, 233]),
        ("I", 65535, [255, 255, 255]),
        ("I", 128, [0, 0, 0]),
        ("I", 129, [1, 1, 1]),
        ("F", 0.5, [128, 128, 128]),
        ("F", 1.0, [255, 255, 255]),
        ("HSV", (0, 255, 255), [255, 0, 0]),
    ],
)
def test_decode_of_pillow_image_gives_visible_colour(mode, color, serving):
    assert pixels(Image.new(mode, (2, 1), color)) == [serving] * 2


@pytest.mark.parametrize(
    ("data", "serving", "reference"),
    [
        (
            raw_png(2, 8, PALETTE, b"\0\1", bytes([0, 128]), bytes([1, 2, 3, 5, 5, 5])),
            [[255, 255, 255], [130, 130, 130]],
            [[1, 2, 3], [5, 5, 5]],
        ),
        (raw_png(2, 8, PALETTE, b"\0\1", bytes([0]), bytes(6)), [[255] * 3, [0] * 3], [[0] * 3, [0] * 3]),
        (
            raw_png(2, 8, RGB, bytes([1, 2, 3, 4, 5, 6]), bytes([0, 1, 0, 2, 0, 3])),
            [[255, 255, 255], [4, 5, 6]],
            [[1, 2, 3], [4, 5, 6]],
        ),
        (raw_png(2, 8, GREY, bytes([5, 6]), bytes([0, 5])), [[255] * 3, [6] * 3], [[5] * 3, [6] * 3]),
        (raw_png(2, 4, GREY, bytes([0x5F]), bytes([0, 5])), [[255] * 3, [255] * 3], [[85] * 3, [255] * 3]),
        (raw_png(4, 2, GREY, bytes([0b00_01_10_11]), bytes([0, 1])), [[0] * 3, [255] * 3, [170] * 3, [255] * 3], None),
        (raw_png(2, 1, GREY, bytes([0b0100_0000]), bytes([0, 0])), [[255] * 3, [255] * 3], [[0] * 3, [255] * 3]),
        (raw_png(2, 16, GREY, bytes([5, 6, 0x80, 0]), bytes([5, 6])), [[255] * 3, [128] * 3], None),
        (raw_png(1, 16, GREY_ALPHA, bytes([0x80, 0, 0, 0])), [[255] * 3], [[128] * 3]),
        (
            raw_png(2, 16, RGB, bytes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), bytes([1, 2, 3, 4, 5, 6])),
            [[255, 255, 255], [7, 9, 11]],
            [[1, 3, 5], [7, 9, 11]],
        ),
        (raw_png(1, 16, RGB, bytes([0x12, 0x34] * 3)), [[18, 18, 18]], [[18, 18, 18]]),
    ],
    ids=["P", "P-one", "RGB", "L", "L4", "L2", "1", "I16", "LA16", "RGB16", "RGB16-opaque"],
)
def test_decode_of_transparent_colour_in_png_is_white_in_serving(data, serving, reference):
    assert pixels(data) == serving
    if reference is not None:
        assert pixels(data, "reference") == reference


def test_decode_of_colour_key_beyond_eight_bits_changes_no_pixel():
    image = Image.new("L", (1, 1), 44)
    image.info["transparency"] = 300
    assert pixels(image) == [[44, 44, 44]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "LA", "I;16"])
def test_decode_of_every_exif_orientation_is_upright_in_serving_only(orientation, mode):
    stored = Image.new(mode, (4, 2))
    for x in range(4):
        for y in range(2):
            value = 10 * x + 100 * y + 3
            stored.putpixel((x, y), {"RGB": (value, 0, 7), "LA": (value, 200), "I;16": value * 257}[mode])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encode(stored, exif=exif)

    plain = decode_image(encode(stored), mode="serving")
    turned = Image.fromarray(plain)
    turned.getexif()[ExifTags.Base.Orientation] = orientation
    expected = np.asarray(ImageOps.exif_transpose(turned))
    assert expected.shape == ((4, 2, 3) if orientation >= 5 else (2, 4, 3))
    assert np.array_equal(decode_image(data, mode="serving"), expected)
    assert decode_image(data, mode="reference").shape == (2, 4, 3)


@pytest.mark.parametrize("orientation", [0, 9, 60000])
def test_decode_of_unknown_exif_orientation_leaves_image_as_stored(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert decode_image(encode(Image.new("RGB", (4, 2)), exif=exif), mode="serving").shape == (2, 4, 3)


def test_decode_of_broken_exif_leaves_image_as_stored():
    data = encode(Image.new("RGB", (4, 2), (9, 9, 9)), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09junk")
    assert decode_image(data, mode="serving").shape == (2, 4, 3)


@pytest.mark.parametrize("mode", ["serving", "reference"])
def test_decode_of_cmyk_jpeg_gives_colours(mode):
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert pixels(data, mode)[0] == [255, 0, 0]


@pytest.mark.parametrize("mode", ["serving", "reference"])
@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_decode_of_animation_gives_first_frame(kind, options, mode):
    frames = [Image.new("RGB", (6, 3), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
    assert Image.open(BytesIO(data)).n_frames == 3
    assert decode_image(data, mode=mode).tolist() == [[[255, 0, 0]] * 6] * 3


def test_decode_of_gif_with_transparent_background_is_white_in_serving():
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    data = encode(palette, "GIF", transparency=0)
    assert pixels(data) == [[255, 255, 255], [40, 50, 60]]
    assert pixels(data, "reference") == [[10, 20, 30], [40, 50, 60]]


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1)])
def test_decode_of_slivers_keeps_every_pixel(size):
    assert decode_image(encode(Image.new("RGB", size, (1, 2, 3))), mode="serving").shape == (size[1], size[0], 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("mode", ["serving", "reference"])
def test_decode_of_served_format_equals_pillow(kind, mode, tmp_path):
    image = Image.fromarray((np.arange(48 * 32 * 3) % 251).astype(np.uint8).reshape(32, 48, 3))
    data = encode(image, kind)
    expected = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    file = tmp_path / "picture.bin"  # told by content, never by name
    file.write_bytes(data)
    for source in (data, file, str(file)):
        assert np.array_equal(decode_image(source, mode=mode), expected)
    with Image.open(file) as opened:
        assert np.array_equal(decode_image(opened, mode=mode), expected)


def test_decode_of_callers_image_does_not_change_it():
    image = Image.new("RGBA", (3, 2), (9, 9, 9, 0))
    before = image.tobytes()
    decode_image(image, mode="serving")
    assert (image.mode, image.tobytes()) == ("RGBA", before)


def test_decode_on_many_threads_silences_pillow_and_restores_filters():
    palette = raw_png(2, 8, PALETTE, b"\0\1", bytes([0, 128]), bytes(6))  # Pillow warns when it becomes RGB
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: pixels(palette, "reference"), range(100)))
    assert results == [[[0, 0, 0], [0, 0, 0]]] * 100
    assert list(warnings.filters) == before
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
