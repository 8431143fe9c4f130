"""What the gateway measures, under the names that operators know.

Counters and histograms are written once per event by a request's `RequestRecord`; gauges and the engines' own
counters are read from `EngineStats` when somebody scrapes. Labels are bounded: served model names, route patterns,
status codes. Nothing here names a request, a user or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from toque.monitor.engine_metrics import EngineCollector
from toque.monitor.native_histogram import native
from toque.monitor.series import Distribution, ModelSeries
from toque.monitor.vllm_metrics import VllmCollector
from toque.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NATIVE = "application/openmetrics-text;version=2.0.0"  # in no older format does the library spell them

_COUNTERS: tuple[tuple[str, str, Callable[[ModelSeries], float]], ...] = (
    ("toque_prompt_tokens", "Prompt tokens of requests that began.", lambda m: m.prompt_tokens),
    (
        "toque_prompt_tokens_cached",
        "The part of toque_prompt_tokens_total that was found in the prefix cache.",
        lambda m: m.cached_tokens,
    ),
    (
        "toque_generation_tokens",
        "Tokens generated, also for clients that left.",
        lambda m: m.generated_tokens,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelSeries], Distribution]], ...] = (
    (
        "toque_time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda m: m.first_token,
    ),
    (
        "toque_inter_token_latency_seconds",
        "Between one token of a choice and its next.",
        lambda m: m.inter_token,
    ),
    (
        "toque_e2e_request_latency_seconds",
        "From a request's arrival to the end of its answer, for requests that were answered in full.",
        lambda m: m.end_to_end,
    ),
    (
        "toque_request_queue_seconds",
        "From a sequence's arrival at its engine to its first step.",
        lambda m: m.queue,
    ),
    (
        "toque_request_prompt_tokens",
        "Prompt tokens of each request that was answered in full.",
        lambda m: m.prompt_sizes,
    ),
    (
        "toque_request_generation_tokens",
        "Tokens generated for each request that was answered in full.",
        lambda m: m.answer_sizes,
    ),
)


class Metrics:
    """The registry of one gateway. ``engines`` gives each served model's stats at scrape time."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelSeries] = {}
        self._answered: dict[tuple[str, int], int] = {}
        self._series = _SeriesCollector(self._models, self._answered)
        self._own = (self._series, EngineCollector(engines))
        for collector in self._own:
            self.registry.register(collector)

    def answered(self, endpoint: str, status: int) -> None:
        key = (endpoint, status)
        self._answered[key] = self._answered.get(key, 0) + 1

    def series(self, model: str) -> ModelSeries:
        """The numbers of a served model, to write to."""
        series = self._models.get(model)
        if series is None:
            series = self._models[model] = ModelSeries()
        return series

    def record(self, model: str, arrived: float) -> RequestRecord:
        return RequestRecord(self, model, arrived)

    def speak_vllm(self) -> None:
        """Say everything that has a name in vLLM under that name, too."""
        self.registry.register(
            VllmCollector(lambda: (metric for collector in self._own for metric in collector.collect()))
        )

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def negotiated(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type: Prometheus' format, or OpenMetrics 2 for who asks for it, which has native
        histograms beside the others."""
        if _NATIVE in accept.replace(" ", ""):
            encode, content_type = choose_encoder(accept)
            self._series.native = True
            try:
                return encode(self.registry), content_type
            finally:
                self._series.native = False
        return self.exposition(), CONTENT_TYPE


class RequestRecord:
    """One request's measurements. Each is taken once, whatever way the request ends.

    ``arrived`` and the times given are ``time.perf_counter`` seconds.
    """

    def __init__(self, metrics: Metrics, model: str, arrived: float) -> None:
        self._series = metrics.series(model)
        self._arrived = arrived
        self._saw_token = False
        self._closed = False

    def queued(self, seconds: float) -> None:
        """A sequence's first output says how long it waited in its engine."""
        self._series.queue.add(seconds)

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        """A prompt has been computed; once per prompt, however many choices answer it."""
        self._series.prompt_tokens += tokens
        self._series.cached_tokens += cached_tokens

    def tokens(self, count: int, gap: float, now: float) -> None:
        """``count`` tokens of one choice, ``gap`` seconds after its previous one (0: these are its first)."""
        series = self._series
        if not self._saw_token:
            self._saw_token = True
            series.first_token.add(now - self._arrived)
        series.generated_tokens += count
        if gap > 0.0:
            series.inter_token.add(gap / count, count)

    def completed(self, now: float) -> None:
        if not self._closed:
            self._closed = True
            self._series.end_to_end.add(now - self._arrived)


class _SeriesCollector(Collector):
    """What requests wrote, as metrics; with ``native``, histograms in both forms."""

    native = False

    def __init__(self, models: Mapping[str, ModelSeries], answered: Mapping[tuple[str, int], int]) -> None:
        self._models = models
        self._answered = answered

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, text, number in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model",))
            for model, series in self._models.items():
                counter.add_metric((model,), number(series))
            yield counter
        for name, text, distribution in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=("model",))
            for model, series in self._models.items():
                values = distribution(series)
                bounds = [*(repr(float(bound)) for bound in values.bounds), "+Inf"]
                buckets = list(zip(bounds, values.cumulative(), strict=True))
                histogram.add_metric((model,), buckets, values.sum)
                if self.native:
                    histogram.add_sample(name, {"model": model}, 0, native_histogram=native(values))
            yield histogram
        finished = CounterMetricFamily(
            "toque_finished_requests", "Choices by their finish reason.", labels=("model", "reason")
        )
        for model, series in self._models.items():
            for reason, count in series.finished.items():
                finished.add_metric((model, reason), count)
        yield finished
        requests = CounterMetricFamily(
            "toque_requests",
            "HTTP requests by route and outcome (499: the client left).",
            labels=("endpoint", "status"),
        )
        for (endpoint, status), count in self._answered.items():
            requests.add_metric((endpoint, str(status)), count)
        yield requests
