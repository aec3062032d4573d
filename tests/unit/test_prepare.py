"""One image from source to patches, block and digest."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from released import TINY_VISION as TINY

from deepspan.core.media import TokenKind
from deepspan.errors import ImageError
from deepspan.image.layout import block_length
from deepspan.image.prepare import image_digest, prepare_image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image, **options) -> bytes:
    stream = BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


@pytest.mark.parametrize("size", [(30, 24), (5, 5), (200, 10), (10, 200), (1, 400)])
@pytest.mark.parametrize("mode", ["serving", "reference"])
def test_prepared_image_of_tiny_configuration_is_consistent(size, mode):
    image = prepare_image(picture(*size), TINY, mode=mode)
    assert image.patches.shape == (image.grid_rows * image.grid_cols, 12)
    num_rows, num_cols = -(-image.grid_rows // 3), -(-image.grid_cols // 3)
    assert len(image.block.kinds) == block_length(num_rows, num_cols) <= 61
    assert (
        np.count_nonzero(image.block.kinds == TokenKind.IMAGE) == len(image.block.encoder_rows) == num_rows * num_cols
    )


def test_prepared_image_of_rotated_source_is_planned_after_rotation():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = png(picture(30, 12), exif=exif)
    upright, stored = (prepare_image(data, TINY, mode=mode) for mode in ("serving", "reference"))
    assert (upright.grid_rows, upright.grid_cols) == (stored.grid_cols, stored.grid_rows)


def test_prepared_image_of_needle_differs_between_modes():
    needle = Image.new("RGB", (1, 400), (255, 255, 255))
    serving, reference = (prepare_image(needle, TINY, mode=mode) for mode in ("serving", "reference"))
    assert (serving.patches == 1).any()
    assert not (reference.patches == 1).any()
    assert serving.digest != reference.digest


def test_digest_of_same_pixels_ignores_the_file_around_them():
    image = picture(9, 7)
    first = prepare_image(png(image), TINY).digest
    assert len(first) == 64
    assert first == prepare_image(png(image, compress_level=0), TINY).digest == prepare_image(image, TINY).digest


def test_digest_of_other_pixels_size_or_mode_differs():
    pixels = np.asarray(picture(8, 6))
    changed = pixels.copy()
    changed[5, 7, 2] ^= 1
    digests = [
        image_digest(pixels, TINY, "serving"),
        image_digest(pixels, TINY, "reference"),
        image_digest(changed, TINY, "serving"),
        image_digest(pixels.reshape(8, 6, 3), TINY, "serving"),
    ]
    assert len(set(digests)) == len(digests)


def test_digest_of_configuration_covers_preprocessing_and_nothing_else():
    pixels = np.asarray(picture(8, 6))
    preprocessing = {"patch_size", "downsample_ratio", "max_n_token", "min_pixels", "max_wh_ratio"}
    base = image_digest(pixels, TINY, "serving")
    for field in fields(TINY):
        other = replace(TINY, **{field.name: getattr(TINY, field.name) + 1})
        assert (image_digest(pixels, other, "serving") != base) == (field.name in preprocessing), field.name


def test_digest_of_view_equals_that_of_contiguous_copy():
    pixels = np.asarray(picture(8, 6))
    assert image_digest(pixels[:, ::-1], TINY, "serving") == image_digest(pixels[:, ::-1].copy(), TINY, "serving")


def test_prepare_on_many_threads_equals_prepare_alone():
    sources = [png(picture(20 + n, 30 - n, seed=n)) for n in range(8)]
    alone = [prepare_image(source, TINY) for source in sources]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda source: prepare_image(source, TINY), sources * 4))
    for index, image in enumerate(together):
        expected = alone[index % 8]
        assert image.digest == expected.digest
        assert image.patches.tobytes() == expected.patches.tobytes()
        assert image.block.kinds.tobytes() == expected.block.kinds.tobytes()


def test_prepare_of_shape_without_room_is_refused():
    with pytest.raises(ImageError, match="vision_max_n_token 7"):
        prepare_image(picture(20, 20), replace(TINY, max_n_token=7))
