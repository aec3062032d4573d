"""Records of a placed image: token kinds, the block of one image, its span in a prompt, its pixels.

Owns the vocabulary shared by `image` (which makes these), `engine` (which places them), `model` (which reads kinds) and
the scheduler (which must not cut a span). Pure integers and numpy; torch never appears here.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class TokenKind(IntEnum):
    """What a token is to the embedding, the router and the visibility rule (spec of the N-layout).

    The values 0..4 are the release's sentinel codes, so that `sentinel id = base + kind`.
    """

    TEXT = -1
    START = 0
    PAD = 1
    IMAGE = 2
    NEWLINE = 3
    END = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBlock:
    """Position-independent part of an image: START, cells in emission order, tail pads, END.

    kinds: int8 [num_tokens], `TokenKind` values.
    encoder_rows: int32 [num_rows * num_cols]; the j-th IMAGE token takes encoder output row `encoder_rows[j]`.
    """

    kinds: np.ndarray
    encoder_rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Where a placed image may be seen from: absolute positions, both ends included.

    offset: first lead pad (what the scheduler must not cut begins here).
    first, last: START and END (what attention sees in both directions).
    """

    offset: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """One image ready for the vision encoder; independent of where it will stand in a prompt.

    patches: float32 [grid_rows * grid_cols, 3 * patch * patch], values rounded to bfloat16, each patch channel-first.
    grid_rows, grid_cols: patches of the vision encoder (before the aligner merges them).
    block: the image's tokens without lead pads.
    digest: hex SHA-256 over decoded pixels and processing options, the identity used by caches.
    """

    patches: np.ndarray
    grid_rows: int
    grid_cols: int
    block: ImageBlock
    digest: str
