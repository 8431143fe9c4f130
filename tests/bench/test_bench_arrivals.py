"""Arrival processes and lengths against the distributions that they are named after."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from toque.bench.arrivals import arrivals
from toque.bench.lengths import Lengths
from toque.errors import ConfigError

FOREVER = float("inf")


def furthest(values: Sequence[float], cdf: Callable[[float], float]) -> float:
    """The Kolmogorov-Smirnov distance times the square root of the count: above 1.95 in one of a thousand samples."""
    ranked, n = sorted(values), len(values)
    off = max(max((i + 1) / n - cdf(v), cdf(v) - i / n) for i, v in enumerate(ranked))
    return off * math.sqrt(n)


def test_constant_arrivals_are_evenly_spaced_without_drift() -> None:
    due = arrivals("constant", 3.0, "s", requests=100_000, duration_s=FOREVER)
    assert due == [i / 3.0 for i in range(100_000)]


def test_poisson_gaps_are_exponential_and_independent() -> None:
    due = arrivals("poisson", 50.0, "s", requests=20_001, duration_s=FOREVER)
    gaps = [b - a for a, b in pairwise(due)]
    assert due[0] == 0.0
    assert furthest(gaps, lambda x: 1 - math.exp(-50 * x)) < 1.95
    assert (
        furthest(gaps, lambda x: 1 - math.exp(-55 * x)) > 1.95
    )  # the check can tell a rate that is 10 % off
    assert furthest([1 / 50] * 1000, lambda x: 1 - math.exp(-50 * x)) > 1.95  # and constant ones
    mean = statistics.fmean(gaps)
    drift = [(a - mean) * (b - mean) for a, b in pairwise(gaps)]
    assert abs(statistics.fmean(drift)) / statistics.pvariance(gaps) < 4 / math.sqrt(len(gaps))


def test_poisson_counts_have_their_mean_as_variance() -> None:
    due = arrivals("poisson", 4.0, "t", requests=10**9, duration_s=5000.0)
    assert due[-1] < 5000.0
    counts = [0] * 5000
    for at in due:
        counts[int(at)] += 1
    mean, spread = statistics.fmean(counts), statistics.pvariance(counts)
    assert mean == pytest.approx(4, abs=4 * math.sqrt(4 / 5000))
    assert spread == pytest.approx(4, abs=4 * math.sqrt((4 + 2 * 16) / 5000))


def test_arrivals_end_at_the_first_bound_and_follow_the_seed() -> None:
    assert len(arrivals("poisson", 10, "a", requests=7, duration_s=1e6)) == 7
    assert arrivals("constant", 2, "a", requests=100, duration_s=1.6) == [0.0, 0.5, 1.0, 1.5]
    first, again, other = (arrivals("poisson", 1, seed, requests=9, duration_s=FOREVER) for seed in "aab")
    assert first == again != other


def draws(text: str, count: int = 20_000) -> list[int]:
    lengths, rng = Lengths.parse(text, "--input-tokens"), random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution() -> None:
    assert set(draws("128")) == {128}
    even = draws("64-67")
    counts = [even.count(n) for n in (64, 65, 66, 67)]
    assert sum(counts) == len(even)
    assert sum((c - 5000) ** 2 / 5000 for c in counts) < 16.27  # chi squared, 3 degrees, one in a thousand
    bell = statistics.NormalDist(500, 40)
    # Rounded to whole numbers, a value stands for the unit around it.
    assert (
        furthest(
            [v + random.Random(i).uniform(-0.5, 0.5) for i, v in enumerate(draws("normal:500,40"))], bell.cdf
        )
        < 1.95
    )
    skewed = draws("lognormal:500,400")
    assert statistics.fmean(skewed) == pytest.approx(500, abs=4 * 400 / math.sqrt(len(skewed)))
    logs = [math.log(v) for v in skewed]
    spread = math.log(1 + 0.8**2)
    assert statistics.fmean(logs) == pytest.approx(math.log(500) - spread / 2, abs=0.02)
    assert statistics.stdev(logs) == pytest.approx(math.sqrt(spread), rel=0.03)
    assert min(draws("normal:2,50")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "5-",
        "9-8",
        "1.5",
        "normal:5",
        "normal:0,1",
        "exp:5,1",
        "5,6",
        "9999999",
        "normal:nan,1",
    ],
)
def test_a_length_that_is_none_is_refused_by_the_name_of_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-tokens must be like 128"):
        Lengths.parse(text, "--output-tokens")


@pytest.mark.parametrize("text", ["128", "64-256", "normal:128,32", "lognormal:128,64.5"])
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert str(Lengths.parse(text, "x")) == text
