"""The block tables of all running sequences, in every cache family or in none.

Owns reservation (all families or nothing), sliding release, prefix hits and publication. Life of a sequence: `open`,
`find_prefix`, `admit`, then `extend` before and `commit` after every step, `rollback` where a step came to nothing,
`release` when it is preempted (then `find_prefix` again), `close` at its end. Called by the scheduler alone.

Invariants: a table entry is the null block exactly where its family has let go of the tokens; only committed tokens are
published; a hit leaves at least one token to compute and never ends inside an image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspan.core.media import ImageSpan
from deepspan.core.step import NewBlocks
from deepspan.kv.families import Family
from deepspan.kv.keys import BlockKey, KeyChain
from deepspan.kv.pool import NULL_BLOCK, BlockPool


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """chain: None where nothing is to be shared. tables: by family name, a block per index."""

    token_ids: Sequence[int]
    spans: Sequence[ImageSpan]
    chain: KeyChain | None
    tables: dict[str, list[int]] = field(default_factory=dict)
    num_committed: int = 0
    num_published: int = 0


class CacheManager:
    """Pools of all families, and the tables of open sequences."""

    def __init__(self, families: Sequence[Family], num_blocks: Mapping[str, int], prefix_caching: bool = True) -> None:
        """num_blocks: by family name."""
        self.families = tuple(families)
        self.block_tokens = families[0].block_tokens
        self.pools = {family.name: BlockPool(num_blocks[family.name]) for family in families}
        self._prefix_caching = prefix_caching
        self._sequences: dict[int, _Sequence] = {}

    def open(self, sequence_id: int, token_ids: Sequence[int], spans: Sequence[ImageSpan], chain: KeyChain) -> None:
        """Make a sequence known; it holds nothing yet. token_ids: a list that grows with it."""
        assert sequence_id not in self._sequences, f"sequence {sequence_id} is open"
        kept = chain if self._prefix_caching else None
        self._sequences[sequence_id] = _Sequence(token_ids=token_ids, spans=spans, chain=kept)

    def find_prefix(self, sequence_id: int, wanted: int | None = None) -> int:
        """Tokens that need not be computed again: a whole number of blocks, 0 if there is no hit.

        wanted: tokens that are to be computed, all if not given; the last of them always is.

        Every family is asked at each boundary, from the longest down; a boundary inside an image is none.
        """
        sequence = self._sequences[sequence_id]
        if sequence.chain is None:
            return 0
        longest = ((len(sequence.token_ids) if wanted is None else wanted) - 1) // self.block_tokens
        keys = [sequence.chain.key(block) for block in range(longest)]
        for family in self.families:
            if family.kind == "rows":
                pool = self.pools[family.name]
                longest = next((i for i in range(longest) if pool.find(keys[i]) is None), longest)
        for num_blocks in range(longest, 0, -1):
            boundary = num_blocks * self.block_tokens
            if any(span.offset < boundary <= span.last for span in sequence.spans):
                continue
            if all(
                self.pools[family.name].find(_key(family, sequence.chain, block)) is not None
                for family in self.families
                for block in range(family.first_block(boundary), num_blocks)
            ):
                return boundary
        return 0

    def admit(self, sequence_id: int, prefix: int, num_tokens: int, room_for: int) -> dict[str, NewBlocks] | None:
        """Take over a prefix just found, and reserve for tokens up to `num_tokens`; None (nothing) if they do not fit.

        room_for: tokens whose rows must have free blocks now, though they are reserved later: a prompt that starts
        without room for its end would be preempted, or preempt others, half-way. Returns the whole tables, by family.
        """
        sequence = self._sequences[sequence_id]
        assert not sequence.tables, f"sequence {sequence_id} holds blocks"
        hits = {family.name: self._hit_blocks(family, sequence, prefix) for family in self.families}
        for family in self.families:
            pool, mine = self.pools[family.name], hits[family.name]
            most = max(num_tokens, room_for) if family.kind == "rows" else num_tokens
            revived = sum(block != NULL_BLOCK and pool.is_free(block) for block in mine)
            if self._num_blocks(most) - len(mine) + revived > pool.num_free:
                return None
        for family in self.families:
            for block in hits[family.name]:
                if block != NULL_BLOCK:
                    self.pools[family.name].share(block)
            sequence.tables[family.name] = hits[family.name]
        sequence.num_committed = prefix
        sequence.num_published = prefix // self.block_tokens
        self._append(sequence, num_tokens)
        return {name: NewBlocks(first=0, blocks=tuple(table)) for name, table in sequence.tables.items()}

    def extend(self, sequence_id: int, num_tokens: int) -> dict[str, NewBlocks] | None:
        """Reserve for tokens up to `num_tokens` in every family; None (and nothing) if one has too few blocks."""
        sequence = self._sequences[sequence_id]
        for name, table in sequence.tables.items():
            if self._num_blocks(num_tokens) - len(table) > self.pools[name].num_free:
                return None
        return self._append(sequence, num_tokens)

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Tokens up to `num_tokens` are computed and final: publish whole blocks, let go of what has slid out."""
        sequence = self._sequences[sequence_id]
        assert num_tokens >= sequence.num_committed, "what is committed stays"
        sequence.num_committed = num_tokens
        self._publish(sequence)
        for family in self.families:
            table, pool = sequence.tables[family.name], self.pools[family.name]
            index = min(family.first_block(num_tokens), len(table)) - 1
            while index >= 0 and table[index] != NULL_BLOCK:
                pool.release(table[index])
                table[index] = NULL_BLOCK
                index -= 1

    def rollback(self, sequence_id: int) -> None:
        """Give back blocks reserved beyond the committed tokens."""
        sequence = self._sequences[sequence_id]
        for name, table in sequence.tables.items():
            while len(table) > self._num_blocks(sequence.num_committed):
                self.pools[name].release(table.pop())

    def release(self, sequence_id: int) -> None:
        """Give back everything; what was published can still be found."""
        sequence = self._sequences[sequence_id]
        for name, table in sequence.tables.items():
            # Later blocks first, so that the start of a prompt, which more requests share, is kept longest.
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pools[name].release(block)
        sequence.tables.clear()
        sequence.num_committed = sequence.num_published = 0

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self.release(sequence_id)
        del self._sequences[sequence_id]

    def forget_prefixes(self) -> None:
        """Nothing published so far can be found again."""
        for pool in self.pools.values():
            pool.forget_all()

    def tables(self, sequence_id: int) -> Mapping[str, Sequence[int]]:
        return self._sequences[sequence_id].tables

    def num_committed(self, sequence_id: int) -> int:
        return self._sequences[sequence_id].num_committed

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1, of the family that is fullest."""
        return max(1 - pool.num_free / pool.num_blocks for pool in self.pools.values())

    def check(self) -> None:
        """Prove that no block is leaked or held twice, and that tables are as long as their tokens need."""
        for family in self.families:
            tables = [sequence.tables.get(family.name, []) for sequence in self._sequences.values()]
            self.pools[family.name].check(block for table in tables for block in table if block != NULL_BLOCK)
        for sequence_id, sequence in self._sequences.items():
            for family in self.families:
                table = sequence.tables.get(family.name)
                if table is None:
                    continue
                first = min(family.first_block(sequence.num_committed), len(table))
                assert all(block == NULL_BLOCK for block in table[:first]), f"{family.name} of {sequence_id} holds on"
                assert NULL_BLOCK not in table[first:], f"{family.name} of {sequence_id} has a hole"
                assert len(set(table[first:])) == len(table) - first, f"{family.name} of {sequence_id} repeats a block"
                assert len(table) >= self._num_blocks(sequence.num_committed), (
                    f"{family.name} of {sequence_id} is short"
                )

    def _hit_blocks(self, family: Family, sequence: _Sequence, prefix: int) -> list[int]:
        num_blocks = prefix // self.block_tokens
        first = min(family.first_block(prefix), num_blocks)
        blocks = [NULL_BLOCK] * first
        for index in range(first, num_blocks):
            assert sequence.chain is not None, "a hit without a chain"
            block = self.pools[family.name].find(_key(family, sequence.chain, index))
            assert block is not None, "a hit must still be there"
            blocks.append(block)
        return blocks

    def _append(self, sequence: _Sequence, num_tokens: int) -> dict[str, NewBlocks]:
        added = {}
        for name, table in sequence.tables.items():
            first = len(table)
            table.extend(self.pools[name].take() for _ in range(self._num_blocks(num_tokens) - first))
            if len(table) > first:
                added[name] = NewBlocks(first=first, blocks=tuple(table[first:]))
        return added

    def _publish(self, sequence: _Sequence) -> None:
        if sequence.chain is None:
            return
        num_whole = sequence.num_committed // self.block_tokens
        for index in range(sequence.num_published, num_whole):
            for family in self.families:
                block = sequence.tables[family.name][index]
                if family.is_published and block != NULL_BLOCK:
                    self.pools[family.name].publish(block, _key(family, sequence.chain, index))
        sequence.num_published = num_whole

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


def _key(family: Family, chain: KeyChain, block: int) -> BlockKey:
    """Name of a family's block. The token behind it is known: a hit leaves one to compute, and one follows a commit."""
    return chain.key_with_next(block) if family.looks_ahead else chain.key(block)
