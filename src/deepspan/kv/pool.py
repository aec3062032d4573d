"""Blocks of one family: who holds them, which can be taken, which are kept for reuse.

Invariants: block 0 is the null block and never handed out; a block is free exactly when nobody holds it; a free block
with a key stays reusable until it is taken for something else, the one longest free first. All operations take constant
time per block. Called by `kv.manager` alone.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, numbered from 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * (num_blocks + 1)
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those kept for reuse included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by a key, held ones included."""
        return len(self._key_of)

    def take(self) -> int:
        """Hold a free block with nothing in it; what it was kept for is forgotten."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Hold a block once more; a free one is free no longer."""
        assert block != NULL_BLOCK, "the null block belongs to nobody"
        self._free.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Let go of a block. The last holder leaves it free; with a key it is the last to be taken."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: Hashable) -> bool:
        """Let a held block be found by a key; False if another block has it already."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        assert block not in self._key_of, f"block {block} has a key"
        if key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        return True

    def find(self, key: Hashable) -> int | None:
        return self._block_of.get(key)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def forget_all(self) -> None:
        """Drop every key: nothing published before can be found again."""
        for block in list(self._key_of):
            self._forget(block)

    def check(self, held: Iterable[int]) -> None:
        """Prove that holders and free list add up. held: every block of every table, null blocks left out."""
        counts = [0] * (self.num_blocks + 1)
        for block in held:
            counts[block] += 1
        assert counts == self._holders, "holders and tables differ"
        assert counts[NULL_BLOCK] == 0, "the null block is held"
        free = {block for block in range(1, self.num_blocks + 1) if counts[block] == 0}
        assert free == set(self._free), "free list and holders differ"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks differ"

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
