"""Prometheus metrics under the names that dashboards for vLLM read.

Owns the registry of one server. Invariants: labels never come from users; a request counts in `request_success_total`
exactly once, with the reason it ended for. Called by `server.jobs` and the `/metrics` endpoint.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepspan.async_llm import AsyncLLM
from deepspan.core.media import TokenKind
from deepspan.core.output import RequestOutput, TokenEvent
from deepspan.core.request import Request
from deepspan.engine.core import EngineStats

PREFIX = "vllm:"
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")
_ENGINE = "0"

# name, what it counts, how it is read from the engine's counters
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests waiting to be served.", lambda stats: stats.num_waiting),
    ("kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1.", lambda stats: stats.cache_usage),
    ("gpu_cache_usage_perc", "The same, for older dashboards.", lambda stats: stats.cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_preemptions", "Requests that made room for others and began again.", lambda stats: stats.num_preemptions),
    ("prompt_tokens", "Prompt tokens computed or found in the cache.", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generated_tokens),
    (
        "prefix_cache_queries",
        "Prompt tokens asked for in the prefix cache.",
        lambda stats: stats.num_prompt_tokens + stats.num_cached_tokens,
    ),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.num_cached_tokens),
    ("deepspan_steps", "Steps of the engine.", lambda stats: stats.num_steps),
)


_DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("spec_decode_num_drafts", "Requests and steps with drafts to judge.", lambda stats: stats.num_drafts),
    ("spec_decode_num_draft_tokens", "Drafts judged.", lambda stats: stats.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts taken.", lambda stats: stats.num_accepted_tokens),
)


class Metrics:
    """Metrics of one server."""

    def __init__(self, model: str, llm: AsyncLLM) -> None:
        self._labels = (model, _ENGINE)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self._labels, llm))  # type: ignore[arg-type]
        length = llm.llm.engine.max_model_len
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.", _FIRST)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens.", _BETWEEN)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _BETWEEN
        )
        self._older = self._histogram("time_per_output_token_seconds", "The same, for older dashboards.", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Of a whole request.", _WHOLE)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _up_to(length))
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer.", _up_to(length))
        self._limit = self._histogram("request_params_max_tokens", "Most tokens asked for.", _up_to(length))
        self._choices = self._histogram("request_params_n", "Choices asked for.", _CHOICES)
        self._ended = Counter(
            f"{PREFIX}request_success",
            "Requests ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._image_tokens = Counter(
            f"{PREFIX}image_tokens", "Prompt tokens that belong to images.", _LABELS, registry=self._registry
        ).labels(*self._labels)
        self.image_bytes = Counter(
            f"{PREFIX}image_bytes", "Bytes of images received or fetched.", _LABELS, registry=self._registry
        ).labels(*self._labels)
        self._fetch = self._histogram("image_fetch_seconds", "To read or fetch the images of a request.", _FIRST)
        self.refused = Counter(
            f"{PREFIX}admission_rejections",
            "Requests refused, by status.",
            (*_LABELS, "reason"),
            registry=self._registry,
        )
        Gauge(f"{PREFIX}max_model_len", "Tokens of a request.", _LABELS, registry=self._registry).labels(
            *self._labels
        ).set(length)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def watch(self, requests: Sequence[Request]) -> "Watch":
        """Begin to time the requests of one job."""
        for request in requests:
            self._image_tokens.inc(int((request.kinds != TokenKind.TEXT).sum()))
            self._prompt.observe(len(request.token_ids))
            self._limit.observe(request.params.max_tokens)
            self._choices.observe(request.params.n)
        return Watch(self)

    def refuse(self, status: int) -> None:
        """Count a request that was never started."""
        self.refused.labels(*self._labels, str(status)).inc()

    @contextmanager
    def fetching(self) -> Generator[None]:
        """Time the reading of images."""
        with self._fetch.time():
            yield

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"{PREFIX}{name}", text, _LABELS, buckets=buckets, registry=self._registry)
        return metric.labels(*self._labels)


class Watch:
    """Times one job."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._began = metrics, time.perf_counter()
        self._last: dict[int, float] = {}
        self._firsts: dict[int, float] = {}

    def see(self, event: TokenEvent) -> None:
        """A token has come."""
        if event.token_id is None:
            return
        now = time.perf_counter()
        if event.request in self._last:
            self._metrics._between.observe(now - self._last[event.request])
        else:
            self._firsts[event.request] = now
            self._metrics._first.observe(now - self._began)
        self._last[event.request] = now

    def end(self, outputs: Sequence[RequestOutput | None]) -> None:
        """The job is over; a choice without an output was aborted."""
        metrics, now = self._metrics, time.perf_counter()
        for choice, output in enumerate(outputs):
            reason = output.finish_reason if output is not None else "abort"
            metrics._ended.labels(*metrics._labels, reason).inc()
            metrics._whole.observe(now - self._began)
            if output is None:
                continue
            metrics._generated.observe(len(output.token_ids))
            if len(output.token_ids) > 1 and choice in self._firsts:
                per_token = (self._last[choice] - self._firsts[choice]) / (len(output.token_ids) - 1)
                metrics._per_token.observe(per_token)
                metrics._older.observe(per_token)


class _EngineCollector:
    """Reads the engine's counters when somebody asks for them."""

    def __init__(self, labels: tuple[str, str], llm: AsyncLLM) -> None:
        self._labels, self._llm = labels, llm

    def collect(self) -> Iterable[Metric]:
        stats = self._llm.stats
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        drafting = _DRAFT_COUNTERS if stats.accepted_per_position else ()
        for name, text, read in (*_COUNTERS, *drafting):
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, read(stats))
            yield counter
        if drafting:
            text = "Steps whose draft at this position, and all before it, was taken."
            taken = CounterMetricFamily(
                f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", text, labels=(*_LABELS, "position")
            )
            for position, count in enumerate(stats.accepted_per_position):
                taken.add_metric((*self._labels, str(position)), count)
            yield taken

    def describe(self) -> Iterable[Metric]:
        return ()


def _up_to(longest: int) -> list[int]:
    """1, 2, 5, 10, ... up to a length."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > longest:
                return buckets or [longest]
            buckets.append(step * scale)
        scale *= 10
