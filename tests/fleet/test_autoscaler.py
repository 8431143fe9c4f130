"""How many replicas: what each signal does, and what holds whatever is seen."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.fleet.autoscaler import (
    MOST_PATIENCE,
    Decision,
    ScalingMemory,
    ScalingObservation,
    decide,
    keeps_warm,
)
from toque.fleet.service_rate import ServiceRate
from toque.fleet.spec import KeepWarm, ScalingPolicy
from toque.types import EngineStats

POLICY = ScalingPolicy(min_replicas=0, max_replicas=8)


def run(
    policy: ScalingPolicy, seen: ScalingObservation, seconds: float, memory: ScalingMemory | None = None
) -> Decision:
    """The same load for a while, half a second apart; replicas answer the moment they are asked for."""
    memory = memory or ScalingMemory()
    decision = decide(policy, seen, memory)
    for _ in range(int(seconds * 2)):
        count = decision.replicas
        seen = replace(seen, now=seen.now + 0.5, replicas=count, ready=count)
        if not seen.requests:
            seen = replace(seen, idle_s=seen.idle_s + 0.5)
        decision = decide(policy, seen, decision.memory)
    return decision


def test_requests_beyond_the_target_bring_as_many_replicas_as_they_need() -> None:
    seen = ScalingObservation(now=0.0, replicas=1, ready=1, running=50)
    assert decide(POLICY, seen, ScalingMemory()).replicas == 1
    decision = run(POLICY, seen, 1.0)
    assert decision.replicas == 4
    assert "50 requests, 16 are meant for one replica" in run(POLICY, seen, 0.5).reason


def test_a_short_peak_starts_nothing() -> None:
    peak = ScalingObservation(now=0.0, replicas=1, ready=1, running=50)
    memory = decide(POLICY, peak, ScalingMemory()).memory
    memory = decide(POLICY, replace(peak, now=0.5, running=3), memory).memory
    assert decide(POLICY, replace(peak, now=1.0), memory).replicas == 1


@pytest.mark.parametrize(
    ("signal", "word"),
    [
        ({"queued": 3, "queued_tokens": 9_000, "tokens_per_second": 1_000.0}, "queue delay"),
        ({"waiting": 1, "waiting_s": 2.0}, "queue delay"),
        ({"running": 2, "kv_usage": 0.97}, "KV cache"),
        ({"running": 2, "ttft_p95_s": 5.0}, "p95 TTFT"),
    ],
)
def test_each_signal_alone_asks_for_more_by_its_name(signal: dict[str, float], word: str) -> None:
    policy = ScalingPolicy(min_replicas=1, max_replicas=8, target_ttft_s=1.0)
    seen = replace(ScalingObservation(now=0.0, replicas=2, ready=2), **signal)  # type: ignore[arg-type]
    first = decide(policy, seen, ScalingMemory())
    second = decide(policy, replace(seen, now=1.0), first.memory)
    assert word in second.reason
    assert 3 <= second.replicas <= 4  # at most twice as many as answer
    # And not again before those answer.
    third = decide(policy, replace(seen, now=9.0, replicas=second.replicas), second.memory)
    assert third.replicas == second.replicas


def test_one_cold_start_however_many_wait() -> None:
    seen = ScalingObservation(now=0.0, replicas=0, ready=0, waiting=200, waiting_s=0.1)
    decision = decide(POLICY, seen, ScalingMemory())
    assert decision.replicas == 1
    assert "woken by 200 requests" in decision.reason
    for tick in range(1, 20):  # it takes ten seconds; all the while they wait
        now = tick / 2
        seen = replace(seen, now=now, replicas=1, waiting_s=now)
        decision = decide(POLICY, seen, decision.memory)
        assert decision.replicas == 1
    # It answers. What has come meanwhile is its own to do, for as long as another one would take to come.
    for tick in range(20, 36):
        seen = replace(seen, now=tick / 2, ready=1, waiting=0, waiting_s=0.0, running=200)
        decision = decide(POLICY, seen, decision.memory)
        assert decision.replicas == 1
    assert run(POLICY, seen, 6.0, decision.memory).replicas == 8  # but a load that stays is a load


def test_idle_for_the_delay_and_not_earlier_ends_in_none() -> None:
    seen = ScalingObservation(now=0.0, replicas=3, ready=3)
    assert run(POLICY, seen, 299.0).replicas == 1  # fewer after the down delay, but not none
    decision = run(POLICY, seen, 301.0)
    assert decision.replicas == 0
    assert run(replace_policy(POLICY, min_replicas=1), seen, 900.0).replicas == 1


def test_a_request_in_the_instant_of_the_idle_timer_keeps_the_replica() -> None:
    idle = ScalingObservation(now=0.0, replicas=1, ready=1)
    memory = run(POLICY, idle, 299.5).memory
    arrived = replace(idle, now=300.0, waiting=1, idle_s=0.0)
    assert decide(POLICY, arrived, memory).replicas == 1
    # Nor does one that came and went between two looks: the gateways' clock says so.
    assert decide(POLICY, replace(idle, now=300.0, idle_s=0.2), memory).replicas == 1


def test_a_restarted_autoscaler_stops_nothing_in_a_hurry() -> None:
    seen = ScalingObservation(now=5000.0, replicas=6, ready=6, running=1, idle_s=0.0)
    assert decide(POLICY, seen, ScalingMemory()).replicas == 6
    assert run(POLICY, seen, 59.0).replicas == 6
    assert run(POLICY, seen, 61.0).replicas == 1
    assert decide(POLICY, replace(seen, running=0, idle_s=9999.0), ScalingMemory()).replicas == 6


def test_the_room_of_the_machine_bounds_it_and_is_named() -> None:
    seen = ScalingObservation(now=0.0, replicas=1, ready=1, running=500, max_possible=2)
    decision = run(POLICY, seen, 2.0)
    assert decision.replicas == 2
    assert "32 wanted, room for 2" in decision.reason
    none = ScalingObservation(now=0.0, replicas=0, ready=0, waiting=1, max_possible=0)
    assert decide(POLICY, none, ScalingMemory()).replicas == 0
    assert "room for 0" in decide(POLICY, none, ScalingMemory()).reason
    # What answers is never stopped for a figure that says it cannot be there.
    running = ScalingObservation(now=0.0, replicas=2, ready=2, running=20, max_possible=0)
    assert decide(POLICY, running, ScalingMemory()).replicas == 2


def test_a_step_down_that_is_taken_back_makes_the_next_one_wait_longer() -> None:
    """A queue says when there are too few replicas but not when there is one too many."""
    policy = ScalingPolicy(min_replicas=1, max_replicas=4)
    memory, count, ups = ScalingMemory(), 1, []
    for tick in range(2 * 3600):
        now = tick / 2
        seen = ScalingObservation(
            now=now, replicas=count, ready=count, running=2, waiting=1, waiting_s=2.0 if count == 1 else 0.0
        )
        decision = decide(policy, seen, memory)
        if decision.replicas > count:
            ups.append(now)
        memory, count = decision.memory, decision.replicas
    gaps = [b - a for a, b in pairwise(ups)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8 * policy.downscale_delay_s
    assert len(ups) <= 10
    assert memory.patience == MOST_PATIENCE


@pytest.mark.parametrize(
    ("day", "clock", "open_"),
    [
        (0, "08:59", False), (0, "09:00", True), (0, "17:59", True), (0, "18:00", False), (5, "12:00", False),
    ],
)  # fmt: skip
def test_a_window_is_open_between_its_times_on_its_days(day: int, clock: str, open_: bool) -> None:
    window = KeepWarm(start="09:00", end="18:00", days=("mon", "tue"))
    at = datetime(2026, 6, 1, int(clock[:2]), int(clock[3:]), 30, tzinfo=UTC) + timedelta(days=day)
    assert keeps_warm(window, at) is open_


def test_a_window_over_midnight_belongs_to_the_day_it_starts_on() -> None:
    window = KeepWarm(start="22:00", end="06:00", days=("fri",))
    friday = datetime(2026, 6, 5, tzinfo=UTC)
    assert not keeps_warm(window, friday + timedelta(hours=3))
    assert keeps_warm(window, friday + timedelta(hours=23))
    assert keeps_warm(window, friday + timedelta(hours=29))
    assert not keeps_warm(window, friday + timedelta(hours=47))


def test_a_window_wakes_a_sleeping_model_in_time_and_lets_it_sleep_afterwards() -> None:
    window = KeepWarm(start="09:00", end="10:00", min_replicas=2)
    policy = ScalingPolicy(min_replicas=0, max_replicas=4, keep_warm=(window,))
    nine = datetime(2026, 6, 1, 9, tzinfo=UTC).timestamp()
    memory = ScalingMemory(busy_at=0.0, start_s=20.0)
    seen = ScalingObservation(now=5000.0, replicas=0, ready=0, idle_s=5000.0, zone=UTC)
    assert decide(policy, replace(seen, epoch_s=nine - 30), memory).replicas == 0
    decision = decide(policy, replace(seen, epoch_s=nine - 15), memory)
    assert decision.replicas == 2
    assert "kept warm from 09:00 to 10:00" in decision.reason
    late = replace(seen, now=9000.0, epoch_s=nine + 3600, replicas=2, ready=2, idle_s=9000.0)
    assert decide(policy, late, decision.memory).replicas == 0


def replace_policy(policy: ScalingPolicy, **changes: float) -> ScalingPolicy:
    from msgspec.structs import replace as change

    return change(policy, **changes)


observations = st.builds(
    ScalingObservation,
    now=st.floats(0.0, 20.0),  # of steps: added up below
    replicas=st.just(0),
    ready=st.integers(0, 12),
    epoch_s=st.floats(0.0, 4e9),
    waiting=st.sampled_from([0, 0, 1, 300]),
    waiting_s=st.floats(0.0, 100.0),
    running=st.sampled_from([0, 0, 1, 17, 400]),
    queued=st.sampled_from([0, 0, 2, 90]),
    queued_tokens=st.integers(0, 10**6),
    tokens_per_second=st.sampled_from([0.0, 5.0, 900.0]),
    kv_usage=st.floats(0.0, 1.0),
    ttft_p95_s=st.floats(0.0, 60.0),
    idle_s=st.sampled_from([0.0, 10.0, 400.0]),
    max_possible=st.none() | st.integers(0, 6),
    zone=st.just(UTC),
)
policies = st.builds(
    lambda low, span, down, zero, ttft, warm: ScalingPolicy(
        min_replicas=low,
        max_replicas=max(1, low + span),
        downscale_delay_s=down,
        downscale_to_zero_delay_s=zero,
        target_ttft_s=ttft,
        keep_warm=(KeepWarm(start="08:00", end="20:00", min_replicas=2),) if warm else (),
    ),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from([0.0, 5.0, 60.0]),
    st.sampled_from([0.0, 30.0, 300.0]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)


@given(policies, st.lists(observations, min_size=1, max_size=30))
@settings(deadline=None, max_examples=100)
def test_whatever_is_seen_the_bounds_hold(policy: ScalingPolicy, steps: list[ScalingObservation]) -> None:
    now, count, memory = 0.0, 0, ScalingMemory()
    for step in steps:
        now += step.now
        ready = min(step.ready, count)
        seen = replace(step, now=now, replicas=count, ready=ready)
        decision = decide(policy, seen, memory)
        room = policy.max_replicas
        if seen.max_possible is not None:
            room = min(room, max(seen.max_possible, ready))
        low = min(policy.min_replicas, room)
        assert low <= decision.replicas <= room
        if seen.requests and room:
            assert decision.replicas >= 1
        if count == 0 and seen.requests:
            warm = 2 if policy.keep_warm else 0
            assert decision.replicas <= max(1, policy.min_replicas, warm)
        if decision.replicas == 0 and count and room:
            assert not seen.requests
            assert seen.idle_s >= policy.downscale_to_zero_delay_s
        assert decision.reason
        assert len(decision.memory.needs) <= policy.max_replicas + 2
        assert decision == decide(policy, seen, memory)  # nothing but its arguments counts
        memory, count = decision.memory, decision.replicas


@given(st.integers(1, 300), st.floats(1.0, 32.0), st.integers(1, 8), st.integers(1, 8))
@settings(deadline=None, max_examples=100)
def test_a_constant_load_settles_and_then_nothing_moves(
    load: int, target: float, begin: int, most: int
) -> None:
    policy = ScalingPolicy(min_replicas=1, max_replicas=most, target_ongoing_requests=target)
    count, memory, moves = min(begin, most), ScalingMemory(), []
    for tick in range(250):
        seen = ScalingObservation(now=float(tick), replicas=count, ready=count, running=load)
        decision = decide(policy, seen, memory)
        if decision.replicas != count:
            moves.append(decision.replicas - count)
        memory, count = decision.memory, decision.replicas
    assert len(moves) <= 1  # one step up, or one down: never there and back
    need = min(most, ceil(load / target))
    assert need <= count <= min(most, ceil(load / (target * 0.8)) + 1)


def test_the_service_rate_is_of_computing_not_of_the_clock() -> None:
    rate = ServiceRate()
    a, b = ("m-0", 1), ("m-1", 1)
    rate.observe({a: EngineStats(prompt_tokens=100, device_seconds=1.0)})
    assert rate.per_second == 0.0
    rate.observe(
        {a: EngineStats(prompt_tokens=900, generated_tokens=200, device_seconds=2.0), b: EngineStats()}
    )
    assert rate.per_second == pytest.approx(1000.0)
    # Idle for a while: the same. A restarted process counts from its own zero.
    rate.observe({a: EngineStats(prompt_tokens=900, generated_tokens=200, device_seconds=2.0)})
    rate.observe({("m-0", 2): EngineStats(prompt_tokens=5, device_seconds=0.3)})
    assert rate.per_second == pytest.approx(1000.0)
    # Steps too short to measure are measured together.
    rate.observe({("m-0", 2): EngineStats(prompt_tokens=25, device_seconds=0.32)})
    rate.observe({("m-0", 2): EngineStats(prompt_tokens=105, device_seconds=0.4)})
    assert rate.per_second == pytest.approx(1000.0)
