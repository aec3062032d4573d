"""Cache families: what a model keeps per token, and for how long.

Owns the geometry: one block covers the same `block_tokens` source tokens in every family, whatever number of rows that
is, so that a prefix can be shared at every block boundary and no common multiple is needed. A family says which tokens
must still be there for the next one to be computed; reservation, sliding release and prefix hits all follow from that.
"""

from dataclasses import dataclass, replace
from typing import Literal

from deepspan.config.engine import packed_row_bytes
from deepspan.config.model import OVERLAP_RATIO, ModelConfig

Kind = Literal["rows", "window", "state"]
DRAFT = "draft"  # name of the family of draft stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of cache, for all layers that have it.

    kind: `rows` are compressed and kept from the first token on; `window` keeps raw rows; `state` keeps what a
    compressor needs of the groups that are not complete (and, with overlap, of the one before).
    reach: tokens before the next one that a window or state keeps at most.
    ratio: of rows and state, 1 for a window. layers: that have it. block_rows: rows of one block in one layer; a state
    has fewer than tokens where only the last ones matter: token p lies in row `p % block_tokens % block_rows`.
    row_bytes: bytes of one row in one layer. looks_ahead: whether a row also depends on the token behind it.
    """

    name: str
    kind: Kind
    ratio: int
    reach: int
    layers: tuple[int, ...]
    block_tokens: int
    block_rows: int
    row_bytes: int
    looks_ahead: bool = False

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.block_rows * self.row_bytes

    def first_needed(self, num_tokens: int) -> int:
        """Lowest token that the computation of token `num_tokens` and later ones can read, given those before it."""
        if self.kind == "rows":
            return 0
        if self.kind == "window":
            return max(0, num_tokens - self.reach)
        # A whole group at its end needs nothing more of its own; with overlap its second half goes on.
        group = num_tokens // self.ratio * self.ratio
        return max(0, group - (self.ratio if self.ratio == OVERLAP_RATIO else 0))

    def first_block(self, num_tokens: int) -> int:
        """Lowest block that holds a token of `first_needed`; the block after the last one if there is none."""
        return self.first_needed(num_tokens) // self.block_tokens

    @property
    def is_published(self) -> bool:
        """Whether resuming at a block boundary needs blocks of this family at all."""
        return self.first_needed(self.block_tokens) < self.block_tokens


def cache_families(
    config: ModelConfig,
    block_tokens: int,
    dtype_bytes: int,
    num_drafts: int = 0,
    num_stages: int = 0,
    *,
    is_packed: bool = False,
    is_mtp: bool = False,
) -> tuple[Family, ...]:
    """Families of a model, window first. dtype_bytes: of rows; compressor states are fp32.

    num_drafts: positions that a step may compute and take back; a state keeps that many more rows. num_stages: of a
    drafter, whose rows are a window of their own: its queries see one position more, since they stand behind it.
    is_packed: rows other than the indexer's are kept with kv_dtype fp8. is_mtp: the stage is plain MTP, whose rows see
    what the network's do, and are made of the token behind them too.
    """
    layers = range(config.num_hidden_layers)
    window = Family(
        name="window",
        kind="window",
        ratio=1,
        reach=config.sliding_window - 1,
        layers=tuple(layers),
        block_tokens=block_tokens,
        block_rows=block_tokens,
        row_bytes=packed_row_bytes(config.head_dim, config.qk_rope_head_dim)
        if is_packed
        else config.head_dim * dtype_bytes,
    )
    families = [window]
    for ratio in config.ratios_in_use():
        overlap = ratio == OVERLAP_RATIO
        rows = replace(
            window,
            name=f"rows_{ratio}",
            kind="rows",
            ratio=ratio,
            layers=tuple(layer for layer in layers if config.compress_ratios[layer] == ratio),
            block_rows=block_tokens // ratio,
        )
        families.append(rows)
        if overlap:
            families.append(replace(rows, name=f"index_{ratio}", row_bytes=config.index_head_dim * dtype_bytes))
        # Projected values and gates in fp32; with overlap two of each, for the entries and for the indexer's keys.
        width = 2 * (config.head_dim + config.index_head_dim) if overlap else config.head_dim
        pooled = (2 if overlap else 1) * ratio
        state = replace(
            rows,
            name=f"state_{ratio}",
            kind="state",
            reach=pooled - 1,
            block_rows=min(block_tokens, pooled + -(-num_drafts // ratio) * ratio),
            row_bytes=2 * 4 * width,
        )
        families.append(state)
    if num_stages:
        reach = config.sliding_window - (1 if is_mtp else 0)
        stages = tuple(range(num_stages))
        families.append(replace(window, name=DRAFT, reach=reach, layers=stages, looks_ahead=is_mtp))
    return tuple(families)
