"""The autoscaler over a day of bursty traffic, and the simulation against what can be said by hand."""

from __future__ import annotations

import pytest

from toque.fleet.simulate import Arrival, Figures, Simulation, Speed, bursty_day
from toque.fleet.spec import KeepWarm, ScalingPolicy

LAZY = ScalingPolicy(min_replicas=0, max_replicas=8)
PLAIN = Speed(decode=((1, 10.0), (2, 16.0)), prefill=100.0, max_sequences=2, start_s=5.0)


def test_a_stream_alone_and_two_that_share_take_what_they_must() -> None:
    alone = Simulation([Arrival(100.0, 0, 20)], LAZY, PLAIN, fixed=1).run()
    assert alone.token_s == pytest.approx([0.1])
    assert alone.queue_s == (0.0,)
    # Both run at 8 tokens/s until the first has its 8 (after 1 s); the other's last 8 come at 10/s: 1.8 s in all.
    both = Simulation([Arrival(100.0, 0, 8), Arrival(100.0, 0, 16)], LAZY, PLAIN, fixed=1).run()
    assert both.token_s == pytest.approx([1.8 / 16, 1.0 / 8])


def test_a_prompt_takes_its_own_time() -> None:
    found = Simulation([Arrival(100.0, 50, 10)], LAZY, PLAIN, fixed=1).run()
    assert found.token_s == pytest.approx([(50 / 100 + 10 / 10) / 10])


def test_what_finds_no_place_waits_for_one() -> None:
    found = Simulation([Arrival(100.0, 0, 8)] * 3, LAZY, PLAIN, fixed=1).run()
    assert found.queue_s == pytest.approx([0.0, 0.0, 1.0])


def test_a_wake_takes_a_start_and_however_many_wait_there_is_one() -> None:
    found = Simulation([Arrival(1000.0, 0, 4)] * 2, LAZY, PLAIN).run()
    assert found.queue_s == pytest.approx([5.0, 5.0])
    assert (found.starts, found.wakes, found.most) == (1, 1, 1)
    # Asked for at 1000 s, ready at 1005 s, done 0.5 s later, idle for 300 s (and a tick of 2 s at most).
    assert found.replica_hours * 3600 == pytest.approx(305.5, abs=2.1)


def test_the_same_seed_is_the_same_day() -> None:
    assert bursty_day(3, peak_per_s=0.1) == bursty_day(3, peak_per_s=0.1)
    assert bursty_day(3, peak_per_s=0.1) != bursty_day(4, peak_per_s=0.1)


@pytest.fixture(scope="module")
def day() -> list[Arrival]:
    return bursty_day(1)


@pytest.fixture(scope="module")
def scaled(day: list[Arrival]) -> Figures:
    return Simulation(day, LAZY, Speed()).run()


def test_every_request_of_the_day_is_answered(day: list[Arrival], scaled: Figures) -> None:
    assert 50_000 < len(day) == scaled.requests == len(scaled.token_s)


def test_a_day_costs_a_third_of_a_fleet_that_answers_as_soon(day: list[Arrival], scaled: Figures) -> None:
    """Five replicas all day have the bursts wait no longer; three cost twice as much and have them wait minutes."""
    assert scaled.replica_hours < 45
    assert scaled.queue(0.99) < 0.1
    assert scaled.queue(1.0) <= 1.0  # a wake
    five, three = (Simulation(day, LAZY, Speed(), fixed=count).run() for count in (5, 3))
    assert five.replica_hours == pytest.approx(120, abs=0.5)
    assert scaled.token(0.95) < 1.5 * five.token(0.95)
    assert three.queue(0.99) > 30


def test_a_quiet_night_is_slept_through_and_bursts_start_few(scaled: Figures) -> None:
    assert 10 <= scaled.wakes <= 40
    assert scaled.starts <= 120
    assert scaled.most <= 8
    for before, change, after in zip(scaled.reasons, scaled.reasons[1:], scaled.reasons[2:], strict=False):
        if before[1] < change[1] > after[1]:  # what was started stays for a while
            assert after[0] - change[0] >= LAZY.downscale_delay_s


def test_replicas_that_take_long_to_start_are_kept_warm_in_office_hours() -> None:
    day = bursty_day(2, peak_per_s=0.004, bursts=0)
    slow = Speed(start_s=30.0)
    window = KeepWarm(start="07:00", end="21:00", min_replicas=1)
    plain = Simulation(day, LAZY, slow).run()
    warm = Simulation(day, ScalingPolicy(min_replicas=0, max_replicas=8, keep_warm=(window,)), slow).run()
    assert warm.wakes < plain.wakes / 2
    assert sum(warm.queue_s) < sum(plain.queue_s)
    assert warm.replica_hours < 24 + plain.replica_hours
