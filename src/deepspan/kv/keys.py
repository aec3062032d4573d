"""Names of cached blocks: what a block's contents depend on, hashed as a chain.

A key covers the salt, every token before the block and in it, and every image that overlaps it: identity (decoded
pixels and processing options) and where it stands in the block, because sentinel ids are the same for all images of a
size. Digests have full width, and a hit is confirmed token by token all the same. Called by `kv.manager`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deepspan.core.media import ImageSpan, PreparedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKey:
    """Name of a whole block. Equal keys have equal tokens and images: comparing is what confirms a hit.

    digest: 32 bytes over the chain up to the block's end. token_ids: int64 bytes of the block. images: (digest, offset
    from the block's start) of each that overlaps it. next_id: the token behind the block, where its rows depend on it.
    """

    digest: bytes
    token_ids: bytes
    images: tuple[tuple[str, int], ...]
    next_id: int | None = None

    def __hash__(self) -> int:
        return hash(self.digest)


class KeyChain:
    """Keys of a growing sequence, each made once."""

    def __init__(
        self,
        token_ids: Sequence[int],
        spans: Sequence[ImageSpan],
        images: Sequence[PreparedImage],
        block_tokens: int,
        salt: bytes = b"",
    ) -> None:
        """token_ids: of the sequence, growing at its end. salt: sequences with different ones never share a block."""
        self._token_ids, self._block_tokens = token_ids, block_tokens
        self._images = [(span, image.digest) for span, image in zip(spans, images, strict=True)]
        self._root = hashlib.sha256(b"deepspan:" + salt).digest()
        self._keys: list[BlockKey] = []

    def key(self, block: int) -> BlockKey:
        """Key of a block whose tokens are all known."""
        while len(self._keys) <= block:
            self._keys.append(self._next())
        return self._keys[block]

    def key_with_next(self, block: int) -> BlockKey:
        """Key of a block whose rows depend on the token behind it as well, which must be known.

        Its id says enough: an image that begins there begins with the same sentinels as every other, and one that began
        before is in the key.
        """
        return replace(self.key(block), next_id=self._token_ids[(block + 1) * self._block_tokens])

    def _next(self) -> BlockKey:
        start = len(self._keys) * self._block_tokens
        end = start + self._block_tokens
        assert end <= len(self._token_ids), "only whole blocks have a key"
        ids = np.asarray(self._token_ids[start:end], dtype=np.int64).tobytes()
        overlapping = [one for one in self._images if one[0].offset < end and one[0].last >= start]
        images = tuple((identity, span.offset - start) for span, identity in overlapping)
        digest = hashlib.sha256(self._keys[-1].digest if self._keys else self._root)
        digest.update(ids)
        for identity, offset in images:
            digest.update(f"|{identity}@{offset}".encode())
        return BlockKey(digest=digest.digest(), token_ids=ids, images=images)
