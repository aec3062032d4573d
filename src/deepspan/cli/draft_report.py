"""How well a model's tokens were guessed: counters of an engine, or of any server with vLLM's names, as rates.

Invariants: the mean length counts the token that comes with every judged step; a position's rate is of all steps with
drafts, also of those whose drafts ended before it, so that rates never rise from one position to the next. No torch.
Used by `cli.bench` and `cli.eval`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:spec_decode_"
TIMEOUT = 10.0


class Stats(Protocol):
    """What is read of an engine's counters."""

    @property
    def num_drafts(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def accepted_per_position(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Judged steps with drafts, drafts judged, drafts taken; by position, how often the first, second, ... was."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of_stats(cls, stats: Stats) -> "DraftCounts":
        return cls(
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            per_position=dict(enumerate(stats.accepted_per_position)),
        )

    @classmethod
    def of_metrics(cls, text: str) -> "DraftCounts | None":
        """From what `/metrics` says; None if it says nothing of drafts. Raises ValueError if that is no metrics."""
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                if not sample.name.startswith(PREFIX) or not sample.name.endswith("_total"):
                    continue
                if name == "num_accepted_tokens_per_pos":
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0) + int(sample.value)
                else:  # of several engines, one after the other
                    totals[name] = totals.get(name, 0) + int(sample.value)
        if "num_drafts" not in totals:
            return None
        return cls(
            num_drafts=totals["num_drafts"],
            num_draft_tokens=totals.get("num_draft_tokens", 0),
            num_accepted_tokens=totals.get("num_accepted_tokens", 0),
            per_position=positions,
        )

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """What came after `before`."""
        return DraftCounts(
            num_drafts=self.num_drafts - before.num_drafts,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
            per_position={p: count - before.per_position.get(p, 0) for p, count in self.per_position.items()},
        )

    def rates(self) -> dict[str, Any] | None:
        """As JSON can hold it; None where nothing was drafted."""
        if not self.num_drafts:
            return None
        return {
            "steps": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
            "rate_per_position": [self.per_position[p] / self.num_drafts for p in sorted(self.per_position)],
        }


def read_counts(url: str, api_key: str | None) -> DraftCounts | None:
    """Counters of the server whose API is at `url`; None if it does not tell. Never raises for what the server does."""
    parts = urlsplit(url)
    address = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1") + "/metrics", "", ""))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(address, headers=headers, timeout=TIMEOUT)
        return DraftCounts.of_metrics(response.text) if response.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError, KeyError):
        return None


def one_line(rates: Mapping[str, Any]) -> str:
    """The rates in words."""
    positions = " ".join(f"{rate:.2f}" for rate in rates["rate_per_position"])
    return (
        f"{rates['mean_acceptance_length']:.2f} tokens a step, {rates['acceptance_rate']:.1%} of "
        f"{rates['draft_tokens']:,} guesses taken, by position {positions}"
    )
