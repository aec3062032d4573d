"""What decoding refuses: bad input is an ImageError with a reason, never a warning nor another exception."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deepspan.errors import ImageError
from deepspan.image.decode import ImageLimits, decode_image

FORMATS = "JPEG, PNG, GIF or WebP"


def noise(kind: str) -> bytes:
    generator = np.random.default_rng(0)
    stream = BytesIO()
    Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises `width` x `height` pixels and holds none."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data)) + b"\0\0\0\x10IDAT"


SERVED = {kind: noise(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")}


@pytest.mark.parametrize("mode", ["serving", "reference"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"hello, this is text", f"is not {FORMATS}"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", f"is not {FORMATS}"),
        (noise("TIFF"), f"is not {FORMATS}"),
        (noise("BMP"), f"is not {FORMATS}"),
        (noise("PDF"), f"is not {FORMATS}"),
    ],
    ids=["empty", "text", "svg", "tiff", "bmp", "pdf"],
)
def test_decode_of_foreign_data_is_refused_with_served_formats(data, reason, mode):
    with pytest.raises(ImageError, match=reason) as caught:
        decode_image(data, mode=mode)
    assert FORMATS in str(caught.value)


@pytest.mark.parametrize("kind", list(SERVED))
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9])
def test_decode_of_truncated_file_is_refused(kind, kept):
    data = SERVED[kind][: max(1, int(len(SERVED[kind]) * kept))]
    with pytest.raises(ImageError, match=FORMATS) as caught:
        decode_image(data, mode="serving")
    assert "0x" not in str(caught.value)


@given(st.sampled_from(sorted(SERVED)), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=20))
@settings(deadline=None)
def test_decode_of_damaged_file_decodes_or_is_refused(kind, damage):
    data = bytearray(SERVED[kind])
    for place, byte in damage:
        data[int(place * (len(data) - 1))] = byte
    limits = ImageLimits(max_side=512)
    with suppress(ImageError):
        assert decode_image(bytes(data), mode="serving", limits=limits).dtype == np.uint8


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((8193, 1), "8193 x 1 pixels, the longest side served is 8192"),
        ((1, 8193), "the longest side served is 8192"),
        ((10_000, 10_000), "the longest side served is 8192"),  # here Pillow warns
        ((60_000, 60_000), "more than 67108864 pixels"),  # here it raises
        ((0, 5), "the image"),
    ],
)
def test_decode_of_oversized_header_is_refused_before_pixels(size, reason):
    with pytest.raises(ImageError, match=reason):
        decode_image(png_header(*size), mode="serving")


def test_decode_over_pixel_limit_is_refused_with_both_numbers():
    with pytest.raises(ImageError, match="40 x 40 pixels, at most 1599 are served"):
        decode_image(SERVED["PNG"], mode="serving", limits=ImageLimits(max_pixels=1599))
    assert decode_image(SERVED["PNG"], mode="serving", limits=ImageLimits(max_pixels=1600)).shape == (40, 40, 3)


def test_decode_over_byte_limit_is_refused(tmp_path):
    size = len(SERVED["PNG"])
    file = tmp_path / "picture.png"
    file.write_bytes(SERVED["PNG"])
    for source in (SERVED["PNG"], file):
        with pytest.raises(ImageError, match=f"more than {size - 1} bytes"):
            decode_image(source, mode="serving", limits=ImageLimits(max_bytes=size - 1))
        assert decode_image(source, mode="serving", limits=ImageLimits(max_bytes=size)).shape == (40, 40, 3)


def test_decode_of_callers_image_over_limits_is_refused():
    with pytest.raises(ImageError, match="longest side"):
        decode_image(Image.new("L", (9000, 1)), mode="serving")
    with pytest.raises(ImageError, match="no pixels: 0 x 4"):
        decode_image(Image.new("L", (0, 4)), mode="serving")


def test_decode_of_missing_file_is_refused(tmp_path):
    for source in (tmp_path / "absent.png", tmp_path, "bad\0name"):
        with pytest.raises(ImageError, match=r"no image file|cannot be read"):
            decode_image(source, mode="serving")


@pytest.mark.parametrize(("mode", "color"), [("F", 1.5), ("F", -0.1), ("F", float("nan")), ("I", -1), ("I", 65536)])
def test_decode_of_grey_outside_known_range_is_refused(mode, color):
    with pytest.raises(ImageError, match="must lie in 0"):
        decode_image(Image.new(mode, (2, 2), color), mode="serving")
