"""How many blocks a request needs, how many a memory budget gives, and how many requests that serves.

Owns the formulas. Counting is by whole blocks in every family: a token count divided by a token count promises requests
that do not fit. Called at start-up, at admission and by `deepspan inspect`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.kv.families import Family

RETAINED_SHARE = 8  # of the boundaries of cached prompts, one in so many can be resumed at once when memory is short


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Blocks of a cache. num_blocks: by family. num_bytes: of all of them. max_requests: of full length at once."""

    num_blocks: Mapping[str, int]
    num_bytes: int
    max_requests: int
    num_tokens: int


def full_blocks(length: int, block_tokens: int) -> int:
    """Blocks that keep `length` tokens from the first one on."""
    return -(-length // block_tokens)


def sliding_blocks(look_back: int, in_flight: int, length: int, block_tokens: int) -> int:
    """Blocks at most in use where only `look_back` tokens before those of a step are kept.

    in_flight: tokens of a step, drafts included. One more block because a range of tokens starts inside a block.
    """
    return full_blocks(min(look_back + in_flight, length), block_tokens) + 1


def request_blocks(family: Family, length: int, in_flight: int) -> int:
    """Blocks of a family that one request of `length` tokens holds at most."""
    full = full_blocks(length, family.block_tokens)
    if family.kind == "rows":
        return full
    return min(full, sliding_blocks(family.reach, in_flight, length, family.block_tokens))


def lengths_text(num_tokens: int, length: int) -> str:
    """How many times `num_tokens` holds `length`, cut after two digits: 2.9957 must not look like three requests."""
    hundredths = num_tokens * 100 // length
    return f"{hundredths // 100:,}.{hundredths % 100:02}"


def in_flight_tokens(engine: EngineConfig) -> int:
    """Tokens of one request that one step can compute, and those it may guess behind them."""
    return engine.max_batched_tokens + engine.num_drafts


def reserved_tokens(length: int, engine: EngineConfig) -> int:
    """Tokens that a request of `length` has blocks for at its end: guesses are stored where they would stand."""
    return length + engine.num_drafts


def plan_capacity(families: Sequence[Family], engine: EngineConfig, num_bytes: int) -> Capacity:
    """Split memory between the families.

    Sliding families get what `max_num_seqs` requests use while they run, and one block more for every
    `RETAINED_SHARE` blocks of rows, so that prefixes can be resumed. All families of rows get the same number.
    Raises ConfigError naming the bytes needed if one request of `max_model_len` does not fit.
    """
    working = {family.name: _working_blocks(family, engine) for family in families}
    cost = sum(family.block_bytes * working[family.name] for family in families)
    per_block = sum(f.block_bytes for f in families if f.kind == "rows") * RETAINED_SHARE
    per_block += sum(f.block_bytes for f in families if f.kind != "rows" and f.is_published)
    least = full_blocks(reserved_tokens(engine.max_model_len, engine), engine.block_tokens)
    groups = (num_bytes - cost) // per_block if per_block else 0
    if groups * RETAINED_SHARE < least and any(family.kind == "rows" for family in families):
        needed = cost + -(-least // RETAINED_SHARE) * per_block
        raise ConfigError(
            f"the cache needs {needed:,} bytes for one request of {engine.max_model_len:,} tokens and "
            f"{engine.max_num_seqs} running ones, it may take {num_bytes:,}"
        )
    extra = {"rows": groups * RETAINED_SHARE}
    num_blocks = {
        family.name: working[family.name] + (extra.get(family.kind, groups) if family.is_published else 0)
        for family in families
    }
    return capacity_of(families, engine, num_blocks)


def capacity_of(families: Sequence[Family], engine: EngineConfig, num_blocks: Mapping[str, int]) -> Capacity:
    """What given numbers of blocks can hold."""
    tokens = min((num_blocks[f.name] for f in families if f.kind == "rows"), default=num_blocks[families[0].name])
    return Capacity(
        num_blocks=dict(num_blocks),
        num_bytes=sum(family.block_bytes * num_blocks[family.name] for family in families),
        max_requests=min(engine.max_num_seqs, *(_max_requests(f, engine, num_blocks[f.name]) for f in families)),
        num_tokens=tokens * engine.block_tokens,
    )


def _max_requests(family: Family, engine: EngineConfig, num_blocks: int) -> int:
    """Requests of full length that a family can hold at once, whoever of them has the tokens of a step."""
    if family.kind == "rows":
        return num_blocks // full_blocks(reserved_tokens(engine.max_model_len, engine), family.block_tokens)
    return (num_blocks - full_blocks(in_flight_tokens(engine), family.block_tokens)) // decoding_blocks(family, engine)


def _working_blocks(family: Family, engine: EngineConfig) -> int:
    """Blocks of a sliding family that all running requests hold at most together; 0 for rows."""
    if family.kind == "rows":
        return 0
    in_flight = full_blocks(in_flight_tokens(engine), family.block_tokens)
    return engine.max_num_seqs * decoding_blocks(family, engine) + in_flight


def decoding_blocks(family: Family, engine: EngineConfig) -> int:
    """Blocks of a sliding family that one request holds while it decodes."""
    # A step verifies one draft after another and guesses as many behind them.
    in_flight = 1 + 2 * engine.num_drafts
    length = reserved_tokens(engine.max_model_len, engine)
    return sliding_blocks(family.reach, in_flight, length, family.block_tokens)
