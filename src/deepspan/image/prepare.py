"""One image, ready for the vision encoder and for the prompt: the only entrance to this package for a request.

Owns the order of the steps (decode, plan, patches, layout) and the image's identity. Invariants: the result is a pure
function of the decoded pixels, the vision configuration and the mode, so that it may be made on any thread and cached;
images with equal digests have equal patches and blocks. Called by the engine's input side and by `llm`.
"""

import hashlib

import numpy as np

from deepspan.config.model import VisionConfig
from deepspan.core.media import PreparedImage
from deepspan.image.decode import DEFAULT_LIMITS, ImageLimits, ImageMode, ImageSource, decode_image
from deepspan.image.layout import image_block
from deepspan.image.patches import LETTERBOX_GREY, image_patches
from deepspan.image.resize import plan_resize

PREPROCESS_VERSION = 1  # part of every digest: raise it when the same pixels would give other patches


def prepare_image(
    source: ImageSource,
    vision: VisionConfig,
    *,
    mode: ImageMode = "serving",
    limits: ImageLimits = DEFAULT_LIMITS,
) -> PreparedImage:
    """Decode, resize and lay out one image (bytes, path or Pillow image).

    Raises ImageError if it cannot be decoded, is over a limit, or has a shape that `max_n_token` leaves no room for.
    """
    pixels = decode_image(source, mode=mode, limits=limits)
    height, width, _ = pixels.shape
    plan = plan_resize(width, height, vision, min_content=min_content_of(mode))
    return PreparedImage(
        patches=image_patches(pixels, plan),
        grid_rows=plan.grid_rows,
        grid_cols=plan.grid_cols,
        block=image_block(plan.num_rows, plan.num_cols),
        digest=image_digest(pixels, vision, mode),
    )


def min_content_of(mode: ImageMode) -> int:
    """Shortest side of a drawn picture: a needle of an image stays visible, unless the release's grey is asked for."""
    return 0 if mode == "reference" else 1


def image_digest(pixels: np.ndarray, vision: VisionConfig, mode: ImageMode) -> str:
    """Hex SHA-256 over uint8 pixels [H, W, 3], their size and everything that preprocessing depends on.

    Decoded pixels, not the file: metadata, names and encoders do not count, and no client can choose the identity.
    """
    constants = (
        ("version", PREPROCESS_VERSION),
        ("mode", mode),
        ("height", pixels.shape[0]),
        ("width", pixels.shape[1]),
        ("patch_size", vision.patch_size),
        ("downsample_ratio", vision.downsample_ratio),
        ("max_n_token", vision.max_n_token),
        ("min_pixels", vision.min_pixels),
        ("max_wh_ratio", vision.max_wh_ratio),
        ("letterbox", LETTERBOX_GREY),
    )
    digest = hashlib.sha256(repr(constants).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
