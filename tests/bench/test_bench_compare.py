"""Comparisons with intervals: against slow arithmetic, against a known difference, and against chance."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest

from toque.bench.compare import Change, _figures, _pool, compare
from toque.bench.document import FORMAT, read
from toque.bench.report import Percentiles
from toque.errors import ConfigError


def measured(
    rng: random.Random, scale: float, *, requests: int = 60, repeats: int = 1, name: str = "load"
) -> Any:
    """A document whose TTFTs are exponential of that mean, with three gaps a request."""
    runs = []
    for _ in range(repeats):
        rows = []
        for i in range(requests):
            ttft, gaps = rng.expovariate(1 / scale), [round(1e4 * rng.uniform(0.5, 1.5)) for _ in range(3)]
            rows.append({
                "planned": float(i), "first": i + ttft, "done": i + ttft + 1, "output_tokens": 4, "error": "",
                "gaps_us": gaps,
            })  # fmt: skip
        rate = rng.gauss(100, 2) / scale
        report = {
            "output_tokens_per_second": rate,
            "total_tokens_per_second": 2 * rate,
            "requests_per_second": rate / 4,
        }
        runs.append({"report": report, "samples": rows})
    mean = statistics.fmean(run["report"]["output_tokens_per_second"] for run in runs)
    summary = {
        "output_tokens_per_second": mean, "total_tokens_per_second": 2 * mean, "requests_per_second": mean / 4,
    }  # fmt: skip
    return {"format": FORMAT, "results": [{"name": name, "summary": summary, "repeats": runs}]}


def by_metric(changes: list[Change]) -> dict[str, Change]:
    return {change.metric: change for change in changes}


def test_figures_of_a_resample_equal_those_of_the_list_it_stands_for() -> None:
    rng = random.Random(3)
    document = measured(rng, 0.2, requests=13, repeats=3)
    document["results"][0]["repeats"][1]["samples"][4]["error"] = "timeout"
    rows = [r for run in document["results"][0]["repeats"] for r in run["samples"] if not r["error"]]
    pool = _pool(document["results"][0], "itl")
    assert pool.requests == len(rows) == 38
    for _ in range(50):
        counts = [rng.choice((0, 0, 1, 2, 3)) for _ in rows]
        listed = [gap / 1e6 for row, n in zip(rows, counts, strict=True) for gap in row["gaps_us"] * n]
        expected = Percentiles.of(listed)
        (found,) = _figures(pool, np.array([counts]))
        assert found == pytest.approx([expected.mean, expected.p50, expected.p95, expected.p99])


def test_a_known_difference_is_found_and_its_interval_is_as_wide_as_theory_says() -> None:
    rng = random.Random(5)
    a, b = measured(rng, 0.2, requests=1000), measured(rng, 0.3, requests=1000)
    found = by_metric(compare(a, b))
    change = found["ttft mean"]
    assert change.low is not None
    assert change.high is not None
    assert change.low < 1.5 < change.high
    assert change.verdict == "worse"
    # The logarithm of a ratio of two exponential means has variance 1/n + 1/n.
    width = math.log(change.high) - math.log(change.low)
    assert width == pytest.approx(2 * 1.96 * math.sqrt(2 / 1000), rel=0.15)
    assert by_metric(compare(b, a, resamples=100))["ttft mean"].verdict == "better"
    assert found["itl p50"].verdict == "unclear"
    assert found["output tokens/s"].verdict == ""  # one run says nothing of how far rates stray
    assert found["output tokens/s"].low is None


def test_intervals_hold_what_they_promise() -> None:
    """Of 200 pairs without a difference about 95 % of the intervals have 1 in them."""
    rng = random.Random(7)
    held = 0
    for seed in range(200):
        a, b = measured(rng, 0.2, requests=60), measured(rng, 0.2, requests=60)
        change = by_metric(compare(a, b, resamples=200, seed=seed))["ttft mean"]
        assert change.low is not None
        assert change.high is not None
        held += change.low <= 1 <= change.high
    assert 0.88 <= held / 200 <= 0.99


def test_rates_have_an_interval_from_three_repeats_on() -> None:
    rng = random.Random(9)
    slow, fast = (measured(rng, scale, requests=5, repeats=5) for scale in (0.2, 0.19))
    change = by_metric(compare(slow, fast))["output tokens/s"]
    assert change.low is not None
    assert change.low > 1
    assert change.verdict == "better"
    two = measured(rng, 0.2, requests=5, repeats=2)
    assert by_metric(compare(slow, two))["output tokens/s"].low is None


def test_repeats_that_differ_as_wholes_widen_the_interval() -> None:
    """Requests of one minute resemble each other; drawing only requests would promise far too much."""
    rng = random.Random(11)

    def drifting() -> Any:
        runs = [
            measured(rng, scale, requests=100)["results"][0]["repeats"][0] for scale in (0.1, 0.2, 0.4, 0.8)
        ]
        document = measured(rng, 0.2)
        document["results"][0]["repeats"] = runs
        return document

    def width(a: Any, b: Any) -> float:
        change = by_metric(compare(a, b))["ttft mean"]
        assert change.low is not None
        assert change.high is not None
        return math.log(change.high / change.low)

    steady = [measured(rng, 0.375, requests=100, repeats=4) for _ in range(2)]
    assert width(drifting(), drifting()) > 3 * width(*steady)


def test_only_loads_of_the_same_name_are_compared() -> None:
    rng = random.Random(13)
    one, other = measured(rng, 0.2, name="a"), measured(rng, 0.2, name="b")
    with pytest.raises(ConfigError, match="no load in common: a and b"):
        compare(one, other)


def test_files_that_are_no_reports() -> None:
    for wrong in (b"", b"{", b"[]", b'{"format": "other/1"}', b"\xff"):
        with pytest.raises(ConfigError, match=r"old\.json"):
            read(wrong, "old.json")
    assert read(b'{"format": "toque-bench/1", "results": []}', "x")["results"] == []
