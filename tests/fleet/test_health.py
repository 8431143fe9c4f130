"""What is a hang, and what is not, without any process or clock."""

from __future__ import annotations

import pytest

from toque.fleet.health import HangBounds, Health, Life
from toque.routing.base import ReplicaState

READY = Health(ReplicaState.READY)


def judge(life: Life, start: float, end: float, health: Health | None) -> str:
    """The last word after looking four times a second."""
    now, word = start, ""
    while now <= end and not word:
        word = life.judge(now, health)
        now += 0.25
    return word


@pytest.mark.parametrize(
    ("health", "seconds", "expected"),
    [
        (Health(ReplicaState.DEGRADED, silent_s=4), 100, "no step finished for 60 s"),
        (Health(ReplicaState.DEGRADED), 50, ""),
        (Health(ReplicaState.DEGRADED, silent_s=7), 30, "nothing heard for 5 s"),
        (Health(ReplicaState.DEAD), 5, "session was lost"),
        (Health(ReplicaState.DEAD), 1, ""),
        (Health(ReplicaState.STARTING), 1000, ""),
        (READY, 1000, ""),
        (None, 1000, ""),
    ],
)
def test_what_is_a_hang(health: Health | None, seconds: float, expected: str) -> None:
    word = judge(Life(HangBounds()), 0, seconds, health)
    assert expected in word
    assert bool(expected) == bool(word)


def test_a_state_that_changed_starts_anew() -> None:
    life = Life(HangBounds())
    assert not judge(life, 0, 50, Health(ReplicaState.DEGRADED))
    assert not judge(life, 50.25, 51, READY)
    assert not judge(life, 51.25, 100, Health(ReplicaState.DEGRADED))


def test_nobody_is_blamed_for_our_own_sleep() -> None:
    """After we were stopped for a minute, what the replica said meanwhile is yet to be read."""
    life = Life(HangBounds())
    assert not judge(life, 0, 1, READY)
    assert life.judge(61, Health(ReplicaState.DEGRADED, silent_s=60)) == ""
    assert not judge(life, 61.25, 62, READY)
    assert life.ready_s() == pytest.approx(62, abs=0.3)


@pytest.mark.parametrize(("loaded", "expected"), [(True, 0.0), (False, None)])
def test_one_that_was_ready_between_two_looks_is_no_crash_at_start(
    loaded: bool, expected: float | None
) -> None:
    """A request that kills replicas as soon as they are ready must not pass for a model that does not load."""
    life = Life(HangBounds())
    life.judge(0.0, Health(ReplicaState.STARTING))
    life.judge(0.25, Health(ReplicaState.DEAD, loaded=loaded))
    assert life.ready_s() == expected


@pytest.mark.parametrize("health", [None, Health(ReplicaState.STARTING)])
def test_one_that_nobody_heard_be_ready_was_if_its_placement_says_so(health: Health | None) -> None:
    """It may end so soon that no session of the controller's was connected; its mark stays."""
    life = Life(HangBounds())
    life.judge(0.0, health)
    assert life.ready_s() is None
    life.judge(0.25, health, loaded=True)
    assert life.ready_s() == 0.0
