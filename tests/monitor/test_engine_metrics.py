"""What engines and replicas say of themselves, and the same under vLLM's names."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from toque.monitor.engine_metrics import EngineCollector, ReplicaCollector
from toque.monitor.latency import Latencies
from toque.monitor.metering import Meter
from toque.monitor.metrics import Metrics
from toque.monitor.vllm_metrics import NAMES
from toque.types import EngineStats


def samples(text: str) -> dict[str, float]:
    return {n: float(v) for n, v in re.findall(r"^([^#\s]\S*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def test_a_steps_parts_add_up_to_the_time_in_steps() -> None:
    stats = EngineStats(step_seconds=10.0, device_seconds=9.0, schedule_seconds=0.5)
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: {"m": stats}))
    found = samples(generate_latest(registry).decode())
    phases = ("schedule", "compute", "output")
    parts = {p: found[f'toque_engine_step_seconds_total{{model="m",phase="{p}"}}'] for p in phases}
    assert parts == {"schedule": 0.5, "compute": 8.5, "output": 1.0}


def test_replicas_are_measured_apart_and_their_counters_never_fall() -> None:
    stats = {"a": EngineStats(cpu_seconds=30, memory_bytes=5_000, running=2), "b": EngineStats(cpu_seconds=4)}
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(lambda: {"m": stats}))
    first = samples(generate_latest(registry).decode())
    assert first['toque_replica_memory_bytes{model="m",replica="a"}'] == 5_000
    assert first['toque_replica_requests_running{model="m",replica="a"}'] == 2
    assert first['toque_replica_cpu_seconds_total{model="m",replica="b"}'] == 4
    stats["a"] = EngineStats(cpu_seconds=1)
    second = samples(generate_latest(registry).decode())
    assert second['toque_replica_cpu_seconds_total{model="m",replica="a"}'] == 31


@pytest.fixture
def told() -> dict[str, float]:
    """What /metrics says after one request, with vLLM's names."""
    metrics = Metrics(
        lambda: {"m": EngineStats(running=3, kv_blocks_used=1, kv_blocks_total=4, preemptions=7)}
    )
    metrics.speak_vllm()
    meter = Meter(metrics, Latencies(), "m", 0.0, None)
    meter.queued(0.01)
    meter.prompt(12, 4)
    meter.tokens(1, 0.0, 0.5)
    meter.tokens(1, 0.1, 0.6)
    meter.finished("length")
    meter.completed(0.7)
    return samples(metrics.exposition().decode())


def test_the_same_is_said_under_both_names(told: dict[str, float]) -> None:
    theirs = 'model_name="m"'
    assert told[f'vllm:num_requests_running{{engine="0",{theirs}}}'] == 3
    assert told[f'vllm:kv_cache_usage_perc{{engine="0",{theirs}}}'] == 0.25
    assert told[f'vllm:num_preemptions_total{{engine="0",{theirs}}}'] == 7
    assert told[f'vllm:generation_tokens_total{{engine="0",{theirs}}}'] == 2
    assert told[f'vllm:request_success_total{{engine="0",finished_reason="length",{theirs}}}'] == 1
    assert told[f'vllm:request_prompt_tokens_sum{{engine="0",{theirs}}}'] == 12
    assert told[f'vllm:time_to_first_token_seconds_count{{engine="0",{theirs}}}'] == 1
    assert told[f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",{theirs}}}'] == 1
    for pair in NAMES.items():
        mine, other = (
            sorted(
                v
                for sample, v in told.items()
                if re.match(rf"{name}(_total|_bucket|_sum|_count)?\{{", sample)
            )
            for name in pair
        )
        assert mine == other != [], pair


def test_nothing_is_said_in_vllms_names_unless_asked() -> None:
    assert b"vllm:" not in Metrics(lambda: {}).exposition()
