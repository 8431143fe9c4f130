"""The same measurements under the names that vLLM's dashboards and autoscalers ask for: ``--metrics-compat vllm``.

What Toque does not measure is left out rather than made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Ours without the suffix of the kind, and theirs.
NAMES = {
    "toque_requests_running": "vllm:num_requests_running",
    "toque_requests_waiting": "vllm:num_requests_waiting",
    "toque_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",  # theirs is a ratio, too
    "toque_prefix_cache_queries": "vllm:prefix_cache_queries",
    "toque_prefix_cache_hits": "vllm:prefix_cache_hits",
    "toque_preemptions": "vllm:num_preemptions",
    "toque_prompt_tokens": "vllm:prompt_tokens",
    "toque_generation_tokens": "vllm:generation_tokens",
    "toque_finished_requests": "vllm:request_success",
    "toque_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "toque_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "toque_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "toque_request_queue_seconds": "vllm:request_queue_time_seconds",
    "toque_request_prompt_tokens": "vllm:request_prompt_tokens",
    "toque_request_generation_tokens": "vllm:request_generation_tokens",
}
_LABELS = {"model": "model_name", "reason": "finished_reason"}
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class VllmCollector(Collector):
    """Reads what other collectors collect, and says it again."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            name = NAMES.get(metric.name)
            if name is None:
                continue
            said: Metric = _FAMILIES[metric.type](name, metric.documentation)
            for sample in metric.samples:
                suffix = sample.name.removeprefix(metric.name)
                said.add_sample(name + suffix, _labels(sample.labels), sample.value)
            yield said


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    # Theirs has one engine to a process and numbers it.
    return {_LABELS.get(name, name): value for name, value in labels.items()} | {"engine": "0"}
