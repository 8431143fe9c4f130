"""Plain counts against prometheus-client's own histogram."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from toque.monitor.metrics import Metrics
from toque.monitor.series import Distribution, ModelSeries


def test_a_distribution_shows_as_prometheus_own_histogram_would() -> None:
    rng = random.Random(3)
    ours = Metrics(lambda: {})
    bounds = ModelSeries().queue.bounds
    registry = CollectorRegistry()
    theirs = Histogram("toque_request_queue_seconds", "x", ("model",), buckets=bounds, registry=registry)
    record = ours.record("m", 0.0)
    for _ in range(500):
        value = rng.choice([*bounds, rng.expovariate(1.0), 0.0, 1e6])
        record.queued(value)
        theirs.labels("m").observe(value)

    def lines(text: bytes) -> list[str]:
        return [
            line
            for line in text.decode().splitlines()
            if line.startswith("toque_request_queue") and "_created" not in line
        ]

    assert lines(ours.exposition()) == lines(generate_latest(registry))


def test_several_equal_values_are_one_write() -> None:
    one, many = Distribution((1.0, 2.0)), Distribution((1.0, 2.0))
    one.add(1.5, 3)
    for _ in range(3):
        many.add(1.5)
    assert (one.counts, one.sum) == (many.counts, many.sum) == ([0, 3, 0], 4.5)
    assert one.cumulative() == [0, 3, 3]
