"""What the gateway measures, under the names that operators know. The one file that imports prometheus-client.

Counters and histograms are written once per event by a request's `RequestRecord`; gauges and the engines' own
counters are read from `EngineStats` when somebody scrapes. Labels are bounded: served model names, route patterns,
status codes. Nothing here names a request, a user or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toque.types import EngineStats

# A second series for every one, which nothing here reads. (The function has no annotations.)
cast(Callable[[], None], disable_created_metrics)()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
_INTER_TOKEN = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3, 10)
_END_TO_END = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_QUEUE = (0.001, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("toque_requests_running", "Sequences that the engines are computing.", lambda s: s.running),
    ("toque_requests_waiting", "Sequences in the engines' queues.", lambda s: s.waiting),
    (
        "toque_kv_cache_usage_ratio",
        "KV blocks in use, as a part of all.",
        lambda s: s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
    (
        "toque_tokens_per_second",
        "Tokens that the engines computed per second, lately.",
        lambda s: s.tokens_per_second,
    ),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("toque_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    (
        "toque_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    ("toque_preemptions", "Sequences put back to be computed again.", lambda s: s.preemptions),
    ("toque_engine_steps", "Steps that the engines finished.", lambda s: s.steps),
)


class Metrics:
    """The registry of one gateway. ``engines`` gives each served model's stats at scrape time."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self.registry = CollectorRegistry()
        model = ("model",)
        self.first_token = Histogram(
            "toque_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            model,
            buckets=_FIRST_TOKEN,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "toque_inter_token_latency_seconds",
            "Between one token of a choice and its next.",
            model,
            buckets=_INTER_TOKEN,
            registry=self.registry,
        )
        self.end_to_end = Histogram(
            "toque_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer, for requests that were answered in full.",
            model,
            buckets=_END_TO_END,
            registry=self.registry,
        )
        self.queue = Histogram(
            "toque_request_queue_seconds",
            "From a sequence's arrival at its engine to its first step.",
            model,
            buckets=_QUEUE,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "toque_prompt_tokens", "Prompt tokens of requests that began.", model, registry=self.registry
        )
        self.cached_tokens = Counter(
            "toque_prompt_tokens_cached",
            "The part of toque_prompt_tokens_total that was found in the prefix cache.",
            model,
            registry=self.registry,
        )
        self.generation_tokens = Counter(
            "toque_generation_tokens",
            "Tokens generated, also for clients that left.",
            model,
            registry=self.registry,
        )
        self.requests = Counter(
            "toque_requests",
            "HTTP requests by route and outcome (499: the client left).",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(engines))

    def answered(self, endpoint: str, status: int) -> None:
        self.requests.labels(endpoint, str(status)).inc()

    def record(self, model: str, arrived: float) -> RequestRecord:
        return RequestRecord(self, model, arrived)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class RequestRecord:
    """One request's measurements. Each is taken once, whatever way the request ends.

    ``arrived`` and the times given are ``time.perf_counter`` seconds.
    """

    def __init__(self, metrics: Metrics, model: str, arrived: float) -> None:
        self._first_token = metrics.first_token.labels(model)
        self._inter_token = metrics.inter_token.labels(model)
        self._end_to_end = metrics.end_to_end.labels(model)
        self._queue = metrics.queue.labels(model)
        self._prompt = metrics.prompt_tokens.labels(model)
        self._cached = metrics.cached_tokens.labels(model)
        self._generated = metrics.generation_tokens.labels(model)
        self._arrived = arrived
        self._saw_token = False
        self._closed = False

    def queued(self, seconds: float) -> None:
        """A sequence's first output says how long it waited in its engine."""
        self._queue.observe(seconds)

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        """A prompt has been computed; once per prompt, however many choices answer it."""
        self._prompt.inc(tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)

    def tokens(self, count: int, gap: float, now: float) -> None:
        """``count`` tokens of one choice, ``gap`` seconds after its previous one (0: these are its first)."""
        if not self._saw_token:
            self._saw_token = True
            self._first_token.observe(now - self._arrived)
        self._generated.inc(count)
        if gap > 0.0:
            for _ in range(count):
                self._inter_token.observe(gap / count)

    def completed(self, now: float) -> None:
        if not self._closed:
            self._closed = True
            self._end_to_end.observe(now - self._arrived)


class _EngineCollector(Collector):
    """Engine stats as metrics. A replica that starts again counts from zero; what it lost is added back."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._engines = engines
        self._last: dict[tuple[str, str], float] = {}
        self._lost: dict[tuple[str, str], float] = {}

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to check at registration, and no engine to ask yet

    def collect(self) -> Iterator[Metric]:
        stats = self._engines()
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("model",))
            for model, snapshot in stats.items():
                gauge.add_metric((model,), read(snapshot))
            yield gauge
        for name, text, count in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model",))
            for model, snapshot in stats.items():
                counter.add_metric((model,), self._monotonic(name, model, count(snapshot)))
            yield counter

    def _monotonic(self, name: str, model: str, value: float) -> float:
        key = (name, model)
        last = self._last.get(key, 0.0)
        if value < last:
            self._lost[key] = self._lost.get(key, 0.0) + last - value
        self._last[key] = value
        return value + self._lost.get(key, 0.0)
