"""Percentiles against a sorted list: within the documented error, over windows, and when merged."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.monitor.latency import Latencies, Rolling
from toque.monitor.sketch import ERROR, HIGHEST, LOWEST, Sketch

values = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200)
GRID = (0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0)


def exact(values: list[float], q: float) -> float:
    return sorted(values)[math.floor(q * (len(values) - 1))]


def sketched(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(values)
def test_a_quantile_is_within_one_percent_of_the_value_of_its_rank(values: list[float]) -> None:
    for q, found in zip(GRID, sketched(values).quantiles(GRID), strict=True):
        assert found == pytest.approx(exact(values, q), rel=ERROR * 1.0001)


@given(values, values)
def test_merging_equals_having_seen_everything(left: list[float], right: list[float]) -> None:
    merged = sketched(left)
    merged.merge(sketched(right))
    assert merged.buckets == sketched(left + right).buckets
    assert merged.count == len(left) + len(right)
    assert merged.mean == pytest.approx(sum(left + right) / merged.count)


def test_values_beyond_the_range_are_held_at_its_ends() -> None:
    sketch = sketched([0.0, -1.0, float("nan"), 1e-300, 1e300, float("inf")])
    low, high = sketch.quantiles([0.0, 1.0])
    assert low == pytest.approx(LOWEST, rel=0.03)
    assert high == pytest.approx(HIGHEST, rel=0.03)
    assert len(sketch.buckets) == 2
    assert Sketch().quantiles(GRID) == [0.0] * len(GRID)
    assert Sketch().mean == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_windows_hold_what_happened_in_them(seed: int) -> None:
    rng = random.Random(seed)
    rolling, seen, now = Rolling(), [], 1000.0
    for _ in range(3_000):
        now += rng.expovariate(0.4)
        value = rng.lognormvariate(-2, 1)
        rolling.add(value, now)
        seen.append((now, value))
    for seconds, grain in ((60, 5), (300, 5), (3_600, 60)):
        sketch = rolling.window(seconds, now)
        surely = [v for t, v in seen if t > now - seconds]
        perhaps = [v for t, v in seen if t > now - seconds - 2 * grain]
        assert len(surely) <= sketch.count <= len(perhaps)
        assert sketch.count > 0
        p50 = sketch.quantiles([0.5])[0]
        assert exact(surely, 0.4) * 0.99 <= p50 <= exact(surely, 0.6) * 1.01
    assert rolling.window(3_600, now + 5_000).count == 0


def test_an_hour_counts_each_value_once_at_every_moment() -> None:
    rolling = Rolling()
    for second in range(0, 2_000, 3):
        rolling.add(0.1, float(second))
        assert rolling.window(3_600, float(second)).count == second // 3 + 1


def test_a_snapshot_has_every_model_measure_and_window() -> None:
    clock = [100.0]
    latencies = Latencies(lambda: clock[0])
    latencies.add("m", "ttft", 0.2)
    latencies.add("m", "inter_token", 0.02, times=50)
    clock[0] += 120
    found = latencies.snapshot()
    assert set(found) == {"m"}
    assert found["m"]["ttft"]["1m"].count == 0
    assert found["m"]["ttft"]["5m"].p99 == pytest.approx(0.2, rel=ERROR)
    assert found["m"]["inter_token"]["60m"].count == 50
