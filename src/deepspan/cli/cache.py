"""`deepspan inspect cache`: what caches of a model cost, and how many requests a memory budget serves; no torch."""

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspan.bundled import bundled_model
from deepspan.config.engine import EngineConfig
from deepspan.config.model import load_model_config
from deepspan.errors import ConfigError
from deepspan.kv.capacity import in_flight_tokens, plan_capacity, request_blocks
from deepspan.kv.families import cache_families

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}  # of the indexer's rows where they differ from the others


def show_cache(
    *, model: Path | None, memory: str, max_model_len: int, max_num_seqs: int, max_batched_tokens: int, dtype: str
) -> None:
    """One line per family: rows and bytes of a block, blocks there are, blocks of a request; then what it serves."""
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}, found {dtype!r}")
    config = load_model_config(model or bundled_model())
    engine = EngineConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    ).checked(config)
    families = cache_families(config, engine.block_tokens, _DTYPE_BYTES[dtype], is_packed=dtype == "fp8")
    capacity = plan_capacity(families, engine, parse_bytes(memory))
    table = Table(title=f"caches in {memory}, blocks of {engine.block_tokens} tokens, {dtype} rows")
    for column in ("family", "layers", "rows", "bytes", "blocks", "a request"):
        table.add_column(column, justify="left" if column == "family" else "right", no_wrap=True)
    for family in families:
        table.add_row(
            family.name,
            str(len(family.layers)),
            str(family.block_rows),
            f"{family.block_bytes:,}",
            f"{capacity.num_blocks[family.name]:,}",
            f"{request_blocks(family, engine.max_model_len, in_flight_tokens(engine)):,}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{capacity.num_bytes:,} bytes hold {capacity.num_tokens:,} tokens; "
        f"requests of {engine.max_model_len:,} tokens at once: {capacity.max_requests}, in whole blocks."
    )


def parse_bytes(text: str, what: str = "memory") -> int:
    """`8GiB`, `500 MB` or plain bytes. what: its name in messages. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"{what} must be a number with one of {', '.join(u for u in _UNITS if u)}, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
