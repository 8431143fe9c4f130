"""The judge of a canary."""

from __future__ import annotations

import bisect
import random

import pytest

from toque.fleet.outcomes import difference, judge, percentile, total
from toque.fleet.spec import RolloutPolicy
from toque.routing.base import LATENCY_BOUNDS, VersionOutcomes

POLICY = RolloutPolicy(min_requests=20, max_error_rate=0.02, max_latency_ratio=1.5)


def histogram(seconds: list[float]) -> tuple[int, ...]:
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    for each in seconds:
        counts[bisect.bisect_left(LATENCY_BOUNDS, each)] += 1
    return tuple(counts)


def outcomes(requests: int, errors: int = 0, ttft: float = 0.1, tpot: float = 0.02) -> VersionOutcomes:
    answered = requests - errors
    return VersionOutcomes(
        requests,
        errors,
        answered,
        answered * ttft,
        answered * tpot,
        histogram([ttft] * answered),
        histogram([tpot] * answered),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_percentile_is_that_of_the_sorted_values(seed: int) -> None:
    values = [random.Random(seed * 1000 + n).lognormvariate(-2, 1) for n in range(500)]
    exact = sorted(values)[int(0.95 * len(values))]
    assert percentile(histogram(values), 0.95) == pytest.approx(exact, rel=0.3)
    assert percentile((), 0.95) == 0.0
    assert percentile(histogram([1e6]), 0.95) == LATENCY_BOUNDS[-1]


def test_sums_and_differences() -> None:
    one, two = outcomes(10, 1), outcomes(5)
    assert total([one, two]).requests == 15
    assert difference(total([one, two]), one).ttft_counts == two.ttft_counts
    assert difference(two, total([one, two])).requests == 0  # a gateway is gone
    assert total([]) == VersionOutcomes()


@pytest.mark.parametrize(
    ("old", "new", "bad"),
    [
        (outcomes(100), outcomes(20), ""),
        (outcomes(100), outcomes(3, 3), "3 of 3 requests failed on the new version, 0.0% on the old one"),
        (outcomes(100), outcomes(1, 1), "1 of 1 requests failed"),
        (outcomes(100, 20), outcomes(100, 20), ""),
        (outcomes(100, 20), outcomes(100, 23), "23 of 100 requests failed on the new version, 20.0%"),
        (outcomes(1000, 1), outcomes(100, 2), ""),
        (outcomes(100), outcomes(100, ttft=0.2), "the p95 time to the first token is"),
        (outcomes(100), outcomes(100, tpot=0.05), "the p95 time per token is"),
        (outcomes(100), outcomes(100, ttft=0.12, tpot=0.015), ""),
        (outcomes(100), outcomes(19, ttft=9.0), ""),  # too few to say
        (VersionOutcomes(), outcomes(50, ttft=9.0), ""),  # nothing to compare with
    ],
)
def test_the_verdict(old: VersionOutcomes, new: VersionOutcomes, bad: str) -> None:
    verdict = judge(old, new, old, POLICY)
    assert verdict.bad.startswith(bad)
    assert bool(verdict.bad) == bool(bad)
    assert verdict.enough == (new.requests >= 20)


def test_what_is_known_of_the_old_version_stands_in_for_a_quiet_step() -> None:
    verdict = judge(outcomes(2), outcomes(100, ttft=0.2), outcomes(500), POLICY)
    assert "first token" in verdict.bad
    assert verdict.progress == "20 of 20 requests"
