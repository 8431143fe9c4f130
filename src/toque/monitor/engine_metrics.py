"""What engines and replicas say of themselves, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toque.types import EngineStats

Read = Callable[[EngineStats], float]
_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("toque_requests_running", "Sequences that the engines are computing.", lambda s: s.running),
    ("toque_requests_waiting", "Sequences in the engines' queues.", lambda s: s.waiting),
    ("toque_kv_cache_usage_ratio", "KV blocks in use, as a part of all.", lambda s: _kv_usage(s)),
    (
        "toque_tokens_per_second",
        "Tokens that the engines computed per second, lately.",
        lambda s: s.tokens_per_second,
    ),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("toque_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    (
        "toque_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    ("toque_spec_drafted_tokens", "Guessed tokens that steps verified.", lambda s: s.drafted_tokens),
    ("toque_spec_accepted_tokens", "Guessed tokens that came true.", lambda s: s.accepted_tokens),
    ("toque_preemptions", "Sequences put back to be computed again.", lambda s: s.preemptions),
    ("toque_engine_steps", "Steps that the engines finished.", lambda s: s.steps),
)
# Whose sum is the time inside steps.
_PHASES: tuple[tuple[str, Read], ...] = (
    ("schedule", lambda s: s.schedule_seconds),
    ("compute", lambda s: max(0.0, s.device_seconds - s.schedule_seconds)),
    ("output", lambda s: max(0.0, s.step_seconds - s.device_seconds)),
)
_REPLICA_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("toque_replica_memory_bytes", "Resident memory of a replica's process.", lambda s: s.memory_bytes),
    ("toque_replica_kv_cache_usage_ratio", "A replica's KV blocks in use.", lambda s: _kv_usage(s)),
    ("toque_replica_requests_running", "Sequences that a replica is computing.", lambda s: s.running),
    ("toque_replica_requests_waiting", "Sequences in a replica's queue.", lambda s: s.waiting),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("toque_replica_cpu_seconds", "CPU time of a replica's process, all threads.", lambda s: s.cpu_seconds),
    ("toque_replica_steps", "Steps that a replica finished.", lambda s: s.steps),
)


def _kv_usage(stats: EngineStats) -> float:
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


class Monotonic:
    """Counters of processes that start again from zero, made to grow on.

    Of one process (``alone``), all that it had counted before is added back; of a sum over several, of which some
    may have started again, no more than keeps it from falling.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._last: dict[tuple[str, ...], float] = {}
        self._lost: dict[tuple[str, ...], float] = {}

    def __call__(self, value: float, *key: str) -> float:
        last = self._last.get(key, 0.0)
        if value < last:
            self._lost[key] = self._lost.get(key, 0.0) + last - (0.0 if self._alone else value)
        self._last[key] = value
        return value + self._lost.get(key, 0.0)


class EngineCollector(Collector):
    """Each model's engines, added up."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._engines = engines
        self._monotonic = Monotonic(alone=False)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to check at registration, and no engine to ask yet

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("model",))
            for model, stats in engines.items():
                gauge.add_metric((model,), read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model",))
            for model, stats in engines.items():
                counter.add_metric((model,), self._monotonic(read(stats), name, model))
            yield counter
        steps = CounterMetricFamily(
            "toque_engine_step_seconds",
            "Time inside steps: planning them, computing, handing tokens out.",
            labels=("model", "phase"),
        )
        for model, stats in engines.items():
            for phase, read in _PHASES:
                steps.add_metric((model, phase), self._monotonic(read(stats), phase, model))
        yield steps


class ReplicaCollector(Collector):
    """Each replica on its own. The label is the replica's place in the fleet, which outlives its processes."""

    def __init__(self, replicas: Callable[[], Mapping[str, Mapping[str, EngineStats]]]) -> None:
        """``replicas`` gives the stats by model and replica."""
        self._replicas = replicas
        self._monotonic = Monotonic(alone=True)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        found = [
            (model, replica, stats)
            for model, replicas in self._replicas().items()
            for replica, stats in replicas.items()
        ]
        labels = ("model", "replica")
        for name, text, read in _REPLICA_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for model, replica, stats in found:
                gauge.add_metric((model, replica), read(stats))
            yield gauge
        for name, text, read in _REPLICA_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for model, replica, stats in found:
                counter.add_metric((model, replica), self._monotonic(read(stats), name, model, replica))
            yield counter
