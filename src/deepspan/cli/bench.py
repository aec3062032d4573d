"""`deepspan bench serve`: put a load on a server and say how it took it.

Owns what is computed of the measurements, and how it is shown. Invariants: failed requests are listed and count in no
latency and no throughput; what was asked before the measured ones is reported apart; no torch. Called by `cli.main`.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspan.cli.draft_report import one_line, read_counts
from deepspan.cli.progress import counting, notes
from deepspan.errors import ConfigError
from deepspan.loadgen import Load, Result, Sample, measure

DEFAULT_CONCURRENCY = 8
TOKENS = ("prompt", "cached", "image", "output")
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_SIDE = 8192
LATE_SECONDS = 0.1
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def run(
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    concurrency: int | None,
    rate: float | None,
    image_size: str,
    timeout: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Report to stdout, progress to stderr; exit code 1 if a request failed.

    Raises ConfigError for options that do not fit, and where no server answers.
    """
    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency (closed loop) and --rate (open loop) exclude each other")
    if concurrency is None and rate is None:
        concurrency = DEFAULT_CONCURRENCY
    check_url(url)
    load = Load(concurrency=concurrency, rate=rate, image_size=read_size(image_size), **given)
    before = read_counts(url, api_key)
    with counting("asking", "requests") as progress:
        result = asyncio.run(measure(load, url=url, model=model, api_key=api_key, timeout=timeout, progress=progress))
    found = report(load, result, url)
    after = read_counts(url, api_key)
    found["drafts"] = after.since(before).rates() if before is not None and after is not None else None
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    if found["requests"]["failed"]:
        raise typer.Exit(1)


def check_url(url: str) -> None:
    """Raises ConfigError for what is no http(s) address."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, or a port over 65535
        is_http = False
    if not is_http:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, found {url!r}")


def read_size(text: str) -> tuple[int, int]:
    """`560x420` as (width, height). Raises ConfigError."""
    found = _SIZE.fullmatch(text)
    width, height = map(int, found.groups()) if found else (0, 0)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ConfigError(f"--image-size must be WIDTHxHEIGHT, each from 1 to {MAX_SIDE}, found {text!r}")
    return width, height


def report(load: Load, result: Result, url: str) -> dict[str, Any]:
    """All that was found, as JSON can hold it. Times are seconds; a latency nobody could measure is null.

    inter_token_latency: gaps between pieces of output, of all requests together; a server that sends several tokens at
    once has fewer and longer ones, which `tokens_per_piece` tells. time_per_output_token: mean of a request after its
    first token. send_delay: how late the generator itself was, at most.
    """
    samples = result.samples
    done = [sample for sample in samples if sample.failure is None]
    failures = Counter((sample.status, sample.failure) for sample in samples if sample.failure is not None)
    tokens, num_pieces = _tokens(done), sum(len(sample.outputs) for sample in done)
    gaps = [after - before for s in done for before, after in zip(s.outputs, s.outputs[1:], strict=False)]
    closed = load.rate is None
    return {
        "server": {"url": url, "model": result.model},
        "load": {
            "loop": "closed" if closed else "open",
            **({"concurrency": load.concurrency} if closed else {"rate": load.rate}),
            **{name: getattr(load, name) for name in ("requests", "prompt_tokens", "output_tokens", "shared_prefix")},
            **{name: getattr(load, name) for name in ("images", "seed", "warmup")},
            "image_size": list(load.image_size) if load.images else None,
            "exact_output": result.is_exact,
            "calibrated_prompts": result.is_calibrated,
        },
        "requests": {
            "ok": len(done),
            "failed": len(samples) - len(done),
            "other_length": sum(sample.tokens()["output"] != load.output_tokens for sample in done),
            "without_usage": sum(sample.usage is None for sample in done),
        },
        "failures": [
            {"status": status, "message": message, "count": count}
            for (status, message), count in failures.most_common()
        ],
        "duration": result.seconds,
        "send_delay": max(sample.sent - sample.due for sample in samples),
        "requests_per_second": len(done) / result.seconds,
        "output_tokens_per_second": tokens["output"] / result.seconds,
        "tokens": tokens,
        "tokens_per_piece": tokens["output"] / num_pieces if num_pieces else None,
        "latencies": {
            "time_to_first_token": summary([sample.outputs[0] - sample.due for sample in done]),
            "inter_token_latency": summary(gaps),
            "time_per_output_token": summary([value for s in done if (value := _per_token(s)) is not None]),
            "latency": summary([sample.ended - sample.due for sample in done]),
        },
        "outside": {
            "requests": len(result.outside),
            "failed": sum(sample.failure is not None for sample in result.outside),
            "tokens": _tokens(result.outside),
        },
    }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not values:
        return None
    return {"mean": sum(values) / len(values)} | {name: percentile(values, share) for name, share in SHARES.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Value at the rank `share` (0 to 1), interpolated linearly between the two values nearest to it.

    The smallest value has the rank 0 and the largest the rank 1: the common definition (type 7). Not of nothing.
    """
    assert values, "no percentile of nothing"
    assert 0 <= share <= 1, share
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _per_token(sample: Sample) -> float | None:
    """Seconds per token after the first; None where there is no second one."""
    num_later = sample.tokens()["output"] - 1
    if num_later < 1 or sample.finished is None:
        return None
    return (sample.finished - sample.outputs[0]) / num_later


def _tokens(samples: Sequence[Sample]) -> dict[str, int]:
    counts = [sample.tokens() for sample in samples]
    return {name: sum(count[name] for count in counts) for name in TOKENS}


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    load, requests, tokens = found["load"], found["requests"], found["tokens"]
    loop = f"{load['concurrency']} at once" if load["loop"] == "closed" else f"{load['rate']:g} per second"
    facts = {
        "server": f"{found['server']['model']} at {found['server']['url']}",
        "load": f"{load['requests']} requests, {loop}",
        "answered": f"{requests['ok']} in {found['duration']:.2f} s, {requests['failed']} failed",
        "requests per second": f"{found['requests_per_second']:.2f}",
        "output tokens per second": f"{found['output_tokens_per_second']:.1f}",
        "prompt tokens": f"{tokens['prompt']:,} ({tokens['cached']:,} cached, {tokens['image']:,} of images)",
        "output tokens": f"{tokens['output']:,}",
    }
    if found["drafts"] is not None:
        facts["guesses"] = f"{one_line(found['drafts'])} (of all requests, also those before the measured ones)"
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, Text(value))
    console.print(table)
    table = Table(title="milliseconds")
    table.add_column("")
    for name in ("mean", *SHARES):
        table.add_column(name, justify="right")
    for name, values in found["latencies"].items():
        shown = [f"{1000 * value:,.1f}" for value in values.values()] if values else ["-"] * (1 + len(SHARES))
        table.add_row(name.replace("_", " "), *shown)
    console.print(table)
    if found["failures"]:
        table = Table(title="failed requests")
        for name in ("count", "status", "message"):
            table.add_column(name, overflow="fold")
        for failure in found["failures"]:
            table.add_row(str(failure["count"]), str(failure["status"] or "-"), Text(failure["message"]))
        console.print(table)
    _remark(found)


def _remark(found: dict[str, Any]) -> None:
    """What makes numbers less than they seem."""
    load, requests, outside, late = found["load"], found["requests"], found["outside"], found["send_delay"]
    remarks = {
        f"requests were sent up to {late:.2f} s late: this machine is too slow for the load": late > LATE_SECONDS,
        "the server takes neither ignore_eos nor min_tokens": not load["exact_output"],
        "the server does not tell how it counts: prompts have a word per token": not load["calibrated_prompts"],
        f"{requests['other_length']} answers have another length than asked for": requests["other_length"],
        f"{requests['without_usage']} answers came without usage: pieces are counted": requests["without_usage"],
        f"{outside['failed']} of the requests before the measured ones failed": outside["failed"],
    }
    for text, holds in remarks.items():
        if holds:
            notes.print(f"note: {text}", markup=False)
