"""Token buckets against a plain ledger of what was used when."""

from __future__ import annotations

import random

import pytest

from toque.errors import RateLimitError
from toque.gateway.quota import Allowance, Quota, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_bounds_nothing_is_refused_and_nothing_is_said() -> None:
    quota = Quota(Allowance())
    charges = [quota.enter(10**9) for _ in range(100)]
    assert quota.running == 100
    assert quota.headers() == []
    for charge in charges:
        charge.close(5)
        charge.close(5)  # once is enough
    assert quota.running == 0


@pytest.mark.parametrize("seed", range(5))
def test_over_time_exactly_the_allowance_is_used(seed: int) -> None:
    """A flood for ten minutes gets ten minutes' worth, and one minute's as the first burst."""
    rng = random.Random(seed)
    clock = Clock()
    quota = Quota(Allowance(tokens_per_minute=600, requests_per_minute=0), clock)
    used, waits = 0, []
    while clock.now < 600:
        clock.now += rng.random()
        estimate, actual = rng.randint(1, 60), rng.randint(1, 60)
        try:
            charge = quota.enter(estimate)
        except RateLimitError as error:
            waits.append(error.retry_after_s)
            continue
        charge.close(actual)
        used += actual
    assert len(waits) > 100
    assert all(0 < wait <= 60 for wait in waits)
    assert 600 * 10 <= used <= 600 * 11 + 120


def test_who_waits_as_long_as_told_is_let_in() -> None:
    clock = Clock()
    quota = Quota(Allowance(requests_per_minute=7, tokens_per_minute=100), clock)
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.randint(1, 150)
        try:
            quota.enter(tokens).close(rng.randint(1, 150))
        except RateLimitError as error:
            clock.now += error.retry_after_s + 1e-6
            try:
                quota.enter(tokens).close(tokens)
            except RateLimitError as second:  # the other bound may be the one that holds now
                clock.now += second.retry_after_s + 1e-6
                quota.enter(tokens).close(tokens)


def test_a_request_larger_than_a_minute_runs_when_the_bucket_is_full_and_is_paid_for() -> None:
    clock = Clock()
    quota = Quota(Allowance(tokens_per_minute=60), clock)
    quota.enter(180).close(180)
    with pytest.raises(RateLimitError) as refused:
        quota.enter(1)
    assert refused.value.retry_after_s == pytest.approx(121)
    assert dict(quota.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    clock.now = 121.1
    quota.enter(1).close(1)


def test_a_refused_request_costs_nothing() -> None:
    quota = Quota(Allowance(requests_per_minute=5, tokens_per_minute=10, concurrent_requests=1), Clock())
    before = quota.headers()
    charge = quota.enter(10)
    for _ in range(3):
        with pytest.raises(RateLimitError):
            quota.enter(1)
    charge.close(0)
    assert dict(quota.headers())[b"x-ratelimit-remaining-requests"] == b"4"
    assert (
        dict(quota.headers())[b"x-ratelimit-remaining-tokens"]
        == dict(before)[b"x-ratelimit-remaining-tokens"]
    )


def test_a_clock_that_goes_back_gives_nothing() -> None:
    clock = Clock()
    clock.now = 100.0
    quota = Quota(Allowance(requests_per_minute=1), clock)
    quota.enter(1).close(1)
    clock.now = 50.0
    with pytest.raises(RateLimitError):
        quota.enter(1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0166, "17ms"), (1, "1s"), (1.5, "1.5s"), (59.9, "59.9s"), (360, "6m0s"), (61.9, "1m1s")]
)  # fmt: skip
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
