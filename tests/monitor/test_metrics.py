"""What is counted, and that it is counted once."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from toque.monitor.metrics import Metrics
from toque.types import EngineStats


def values(metrics: Metrics) -> dict[str, float]:
    """Each sample by its name and labels."""
    found = {}
    for line in metrics.exposition().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


@pytest.fixture
def stats() -> dict[str, EngineStats]:
    return {"m": EngineStats()}


@pytest.fixture
def metrics(stats: Mapping[str, EngineStats]) -> Metrics:
    return Metrics(lambda: stats)


def test_a_request_is_counted_once(metrics: Metrics) -> None:
    record = metrics.record("m", arrived=10.0)
    record.queued(0.5)
    record.prompt(7, 3)
    record.tokens(1, 0.0, now=12.0)
    record.tokens(4, 0.4, now=12.4)
    record.completed(13.0)
    record.completed(14.0)
    seen = values(metrics)
    label = '{model="m"}'
    assert seen[f"toque_time_to_first_token_seconds_count{label}"] == 1
    assert seen[f"toque_time_to_first_token_seconds_sum{label}"] == 2.0
    assert seen[f"toque_inter_token_latency_seconds_count{label}"] == 4  # five tokens have four gaps
    assert seen[f"toque_inter_token_latency_seconds_sum{label}"] == pytest.approx(0.4)
    assert seen[f"toque_e2e_request_latency_seconds_count{label}"] == 1
    assert seen[f"toque_e2e_request_latency_seconds_sum{label}"] == 3.0
    assert seen[f"toque_request_queue_seconds_sum{label}"] == 0.5
    assert seen[f"toque_prompt_tokens_total{label}"] == 7
    assert seen[f"toque_prompt_tokens_cached_total{label}"] == 3
    assert seen[f"toque_generation_tokens_total{label}"] == 5


def test_a_request_that_never_began_leaves_no_latency(metrics: Metrics) -> None:
    metrics.record("m", 1.0)
    seen = values(metrics)
    assert not any(
        value for name, value in seen.items() if name.endswith(("_count", "_total", '_count{model="m"}'))
    )


def test_outcomes_are_counted_by_route(metrics: Metrics) -> None:
    for status in (200, 200, 499):
        metrics.answered("/v1/completions", status)
    seen = values(metrics)
    assert seen['toque_requests_total{endpoint="/v1/completions",status="200"}'] == 2
    assert seen['toque_requests_total{endpoint="/v1/completions",status="499"}'] == 1


def test_gauges_show_the_engines_now(metrics: Metrics, stats: dict[str, EngineStats]) -> None:
    stats["m"] = EngineStats(running=3, waiting=2, kv_blocks_used=5, kv_blocks_total=20)
    seen = values(metrics)
    assert seen['toque_requests_running{model="m"}'] == 3
    assert seen['toque_requests_waiting{model="m"}'] == 2
    assert seen['toque_kv_cache_usage_ratio{model="m"}'] == 0.25
    stats["m"] = EngineStats()
    assert values(metrics)['toque_kv_cache_usage_ratio{model="m"}'] == 0.0


def test_counters_of_engines_never_fall_when_a_replica_starts_again(
    metrics: Metrics, stats: dict[str, EngineStats]
) -> None:
    shown = []
    for hits in (5, 9, 2, 4, 0, 3):  # two restarts
        stats["m"] = EngineStats(prefix_hits=hits, preemptions=hits)
        seen = values(metrics)
        assert seen['toque_preemptions_total{model="m"}'] == seen['toque_prefix_cache_hits_total{model="m"}']
        shown.append(seen['toque_prefix_cache_hits_total{model="m"}'])
    assert shown == [5, 9, 9, 11, 11, 14]


def test_buckets_are_cumulative_and_end_at_the_count(metrics: Metrics) -> None:
    record = metrics.record("m", 0.0)
    for gap in (0.0005, 0.01, 0.5, 100.0):
        record.tokens(1, gap, now=1.0)
    buckets = [
        v for n, v in values(metrics).items() if n.startswith("toque_inter_token_latency_seconds_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4


def test_the_designs_names_are_there(metrics: Metrics) -> None:
    metrics.record("m", 0.0)
    metrics.answered("/live", 200)
    names = set(re.findall(r"^# TYPE (\S+)", metrics.exposition().decode(), re.MULTILINE))
    assert {
        "toque_time_to_first_token_seconds",
        "toque_inter_token_latency_seconds",
        "toque_e2e_request_latency_seconds",
        "toque_request_queue_seconds",
        "toque_prompt_tokens_total",
        "toque_generation_tokens_total",
        "toque_requests_total",
        "toque_requests_running",
        "toque_requests_waiting",
        "toque_kv_cache_usage_ratio",
        "toque_prefix_cache_hits_total",
        "toque_prefix_cache_queries_total",
        "toque_preemptions_total",
    } <= names
    assert all(name.startswith("toque_") for name in names)
