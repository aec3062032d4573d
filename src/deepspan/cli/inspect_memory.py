"""`deepspan inspect memory`: what a device would hold, what requests cost, how many fit, and how long loading takes.

Headers or a configuration are enough; nothing is loaded. Options are those of `deepspan serve`.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspan.bundled import bundled_model
from deepspan.cli.options import DraftOptions
from deepspan.cli.sizes import bytes_text, parse_bytes
from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.kv.capacity import lengths_text
from deepspan.runtime.device import pick_device, pick_dtype
from deepspan.runtime.footprint import Footprint, footprint
from deepspan.weights.checkpoint import torch_dtype_name
from deepspan.weights.folder import Headers, StoredTensors
from deepspan.weights.inventory import stored_or_expected
from deepspan.weights.read_speed import read_speed

DEFAULT_CACHE = "8GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """num_bytes: read of the files. speed: bytes a second, or None if nobody knows; measured: on these files.

    set_up: seconds that comparing headers and building the empty network have just taken, which loading repeats.
    """

    num_bytes: int
    speed: float | None
    measured: bool
    set_up: float

    @property
    def seconds(self) -> float | None:
        return None if self.speed is None else self.set_up + self.num_bytes / self.speed


def show_memory(
    *,
    model: Path | None,
    device: str,
    dtype: str,
    num_devices: int,
    cache_memory: str | None,
    device_memory: str | None,
    read_rate: str | None,
    as_json: bool,
    drafts: DraftOptions,
    **limits: Any,
) -> None:
    """limits: fields of EngineConfig. Prints tables (or JSON) to stdout.

    Raises ConfigError or WeightsError naming what cannot be served, or does not fit.
    """
    if cache_memory is not None and device_memory is not None:
        raise ConfigError("--cache-memory and --device-memory exclude each other: caches take what a device has left")
    rate = None if read_rate is None else float(parse_bytes(read_rate))
    if rate == 0:
        raise ConfigError("--read-rate must be above 0")
    folder = model or bundled_model()
    compute = pick_dtype(dtype, pick_device(device))
    begun = time.perf_counter()
    config, stored = stored_or_expected(folder)
    found = footprint(
        stored,
        config,
        EngineConfig(**limits, **drafts.engine_fields()),
        dtype=compute,
        num_ranks=num_devices,
        cache_bytes=None if device_memory is not None else parse_bytes(cache_memory or DEFAULT_CACHE),
        device_bytes=parse_bytes(device_memory) if device_memory is not None else None,
    )
    set_up = time.perf_counter() - begun
    speed = rate if rate is not None else _measured(stored)
    loading = Loading(num_bytes=found.read, speed=speed, measured=rate is None, set_up=set_up)
    if as_json:
        print(json.dumps(_as_record(found, loading, torch_dtype_name(compute)), indent=2))
        return
    console = Console(highlight=False)
    of = f"one of {num_devices} devices" if num_devices > 1 else "the device"
    console.print(_device_table(found, f"memory of {of}: {folder.name} in {torch_dtype_name(compute)}"))
    console.print(_family_table(found))
    for line in (*_request_lines(found), _loading_line(loading)):
        console.print(line, markup=False)


def _measured(stored: StoredTensors) -> float | None:
    return read_speed(stored.files) if isinstance(stored, Headers) else None


def _parts(found: Footprint) -> dict[str, int]:
    """What is on the device beside the weights, by name."""
    parts = {"caches": found.caches, "buffers of a step": found.buffers, "encoder outputs": found.encoder_rows}
    return {name: size for name, size in parts.items() if size} | {"activations, at least": found.step}


def _device_table(found: Footprint, title: str) -> Table:
    table = Table(title=title, show_footer=True)
    table.add_column("part", "all", no_wrap=True)
    table.add_column("bytes", f"{found.total:,}", justify="right", no_wrap=True)
    table.add_column("", bytes_text(found.total), justify="right", no_wrap=True)
    for part, size in found.weights.items():
        table.add_row(part, f"{size:,}", bytes_text(size))
    table.add_section()
    total = sum(found.weights.values())
    table.add_row("weights", f"{total:,}", bytes_text(total))
    for name, size in _parts(found).items():
        table.add_row(name, f"{size:,}", bytes_text(size))
    return table


def _family_table(found: Footprint) -> Table:
    title = f"caches, blocks of {found.engine.block_tokens} tokens; a request of {found.engine.max_model_len:,}"
    table = Table(title=title)
    for column in ("family", "layers", "rows", "block bytes", "blocks", "a token", "decoding", "prefilling"):
        table.add_column(column, justify="left" if column == "family" else "right", no_wrap=True)
    for use in found.families:
        family = use.family
        table.add_row(
            family.name,
            str(len(family.layers)),
            str(family.block_rows),
            f"{family.block_bytes:,}",
            f"{found.capacity.num_blocks[family.name]:,}",
            f"{use.per_token:,.7g}",
            bytes_text(use.decoding),
            bytes_text(use.prefilling),
        )
    return table


def _request_lines(found: Footprint) -> list[str]:
    capacity, length = found.capacity, found.engine.max_model_len
    per_token = sum(use.per_token for use in found.families)
    decoding, prefilling = _request_bytes(found)
    lengths = lengths_text(capacity.num_tokens, length)
    return [
        f"a token of context costs {per_token:,.10g} bytes for good; a request of {length:,} tokens "
        f"{bytes_text(decoding)} while it decodes, {bytes_text(prefilling)} at most while it is read",
        f"{capacity.num_bytes:,} bytes hold {capacity.num_tokens:,} tokens, {lengths} times {length:,}; "
        f"requests of {length:,} tokens at once: {capacity.max_requests}, in whole blocks",
    ]


def _request_bytes(found: Footprint) -> tuple[int, int]:
    return sum(use.decoding for use in found.families), sum(use.prefilling for use in found.families)


def _loading_line(loading: Loading) -> str:
    size = f"loading reads {bytes_text(loading.num_bytes)}"
    if loading.seconds is None:
        return f"{size}; there are no files to measure their speed on: --read-rate says how many bytes a second"
    source = "as measured on these files" if loading.measured else "as given"
    return (
        f"{size}: about {loading.seconds:,.1f} s at {bytes_text(int(loading.speed or 0))} a second, {source}, "
        f"{loading.set_up:,.1f} s of it to build the network"
    )


def _as_record(found: Footprint, loading: Loading, dtype: str) -> dict[str, object]:
    decoding, prefilling = _request_bytes(found)
    capacity = found.capacity
    families = {
        use.family.name: {
            "kind": use.family.kind,
            "layers": len(use.family.layers),
            "block_rows": use.family.block_rows,
            "block_bytes": use.family.block_bytes,
            "blocks": capacity.num_blocks[use.family.name],
            "bytes_per_token": use.per_token,
            "request_bytes_decoding": use.decoding,
            "request_bytes_prefilling": use.prefilling,
        }
        for use in found.families
    }
    return {
        "dtype": dtype,
        "kv_dtype": found.engine.kv_dtype,
        "num_drafts": found.engine.num_drafts,
        "device": {
            "weights": dict(found.weights),
            "caches": found.caches,
            "buffers": found.buffers,
            "encoder_rows": found.encoder_rows,
            "activations_at_least": found.step,
            "total": found.total,
        },
        "families": families,
        "request": {
            "max_model_len": found.engine.max_model_len,
            "bytes_per_token": sum(use.per_token for use in found.families),
            "bytes_decoding": decoding,
            "bytes_prefilling": prefilling,
        },
        "capacity": {
            "bytes": capacity.num_bytes,
            "tokens": capacity.num_tokens,
            "lengths": lengths_text(capacity.num_tokens, found.engine.max_model_len),
            "requests": capacity.max_requests,
        },
        "loading": {
            "bytes": loading.num_bytes,
            "bytes_per_second": loading.speed,
            "is_measured": loading.measured and loading.speed is not None,
            "set_up_seconds": loading.set_up,
            "seconds": loading.seconds,
        },
    }
