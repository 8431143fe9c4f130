"""Rollouts as a state machine: whatever happens, the shares are whole, nothing is missing, and there is an end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import ConflictError
from toque.fleet import rollout as rollouts
from toque.fleet.rollout import Phase, RevisionView, Rollout, Wanted, advance, begin, wanted
from toque.fleet.spec import RolloutPolicy
from toque.routing.base import VersionOutcomes

OLD, NEW = "old", "new"


class Fleet:
    """Replicas of two revisions as "up", "coming" or "going", and nothing else: the dumbest possible machine."""

    def __init__(self, policy: RolloutPolicy, target: int, seed: int) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self.target = target
        self.replicas: dict[str, list[str]] = {OLD: ["up"] * target, NEW: []}
        self.requests = {OLD: 0, NEW: 0}
        self.errors = 0
        self.broken = ""  # why no new replica ever comes up
        self.room_for_two = True
        self.rollout = begin(1, OLD, NEW, policy, self.now)

    def view(self, key: str) -> RevisionView:
        states = self.replicas[key]
        return RevisionView(
            states.count("up"),
            len(states),
            states.count("going"),
            self.broken if key == NEW else "",
            VersionOutcomes(self.requests[key], self.errors if key == NEW else 0),
        )

    def tick(self, seconds: float = 1.0) -> Wanted:
        """Time passes, requests are served, the rollout goes on, and what it wants is carried out."""
        self.now += seconds
        for key in (OLD, NEW):
            if "up" in self.replicas[key]:
                self.requests[key] += 10
        before = self.rollout
        old, new = self.view(OLD), self.view(NEW)
        self.rollout = advance(before, self.target, old, new, self.now, room_for_two=self.room_for_two)
        want = wanted(self.rollout, self.target, old, new)
        assert sum(want.shares.values()) == pytest.approx(1.0)
        assert all(0 < share <= 1 for share in want.shares.values())
        for key in (OLD, NEW):
            self._carry_out(key, want)
        return want

    def _carry_out(self, key: str, want: Wanted) -> None:
        states = self.replicas[key]
        count = want.replicas.get(key, 0)
        staying = [state for state in states if state != "going"]
        while len(staying) > count:
            victim = "coming" if "coming" in staying else "up"
            if victim == "up" and self.rollout.policy.strategy != "swap":
                ready = self.replicas[OLD].count("up") + self.replicas[NEW].count("up")
                overdue = self.now - self.rollout.since > self.rollout.policy.ready_timeout_s
                if not (self.rollout.phase is Phase.RETURNING and overdue):
                    assert ready - 1 >= self.target, f"{self.rollout.phase}: {self.replicas}, {want}"
            staying.remove(victim)
            states[states.index(victim)] = "going"
        states += ["coming"] * (count - len(staying))

    def happen(self, event: str) -> None:
        key = self.random.choice((OLD, NEW))
        states = self.replicas[key]
        if event == "ready" and "coming" in states and not (self.broken and key == NEW):
            states[states.index("coming")] = "up"
        elif event == "gone" and "going" in states:
            states.remove("going")
        elif event == "crash" and "up" in states:
            states[states.index("up")] = "coming"

    def calm(self, ticks: int) -> None:
        """Everything comes up and goes away in its time."""
        for _ in range(ticks):
            if not self.rollout.running:
                return
            for key, states in self.replicas.items():
                up = "coming" if self.broken and key == NEW else "up"
                states[:] = [up if state == "coming" else state for state in states if state != "going"]
            self.tick()

    def steer(self, step: Callable[[Rollout], Rollout]) -> bool:
        try:
            self.rollout = step(self.rollout)
        except ConflictError:
            return False
        return True


POLICIES = st.builds(
    RolloutPolicy,
    strategy=st.sampled_from(["auto", "surge", "canary", "swap"]),
    max_surge=st.integers(1, 2),
    steps=st.sampled_from([(), (0.1,), (0.05, 0.25, 0.5), (0.5, 1.0)]),
    step_s=st.just(3.0),
    min_requests=st.just(5),
    ready_timeout_s=st.just(20.0),
)
EVENTS = st.lists(st.sampled_from(["tick", "tick", "ready", "ready", "gone", "gone", "crash"]), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(POLICIES, st.integers(1, 4), EVENTS, st.integers(0, 1000), st.booleans())
def test_nothing_is_missing_and_there_is_an_end(
    policy: RolloutPolicy, target: int, events: list[str], seed: int, room: bool
) -> None:
    fleet = Fleet(policy, target, seed)
    fleet.room_for_two = room
    for event in events:
        if event == "tick":
            fleet.tick()
            every = [*fleet.replicas[OLD], *fleet.replicas[NEW]]
            assert len(every) <= target + policy.max_surge, f"{fleet.rollout}: {fleet.replicas}"
        else:
            fleet.happen(event)
    fleet.calm(200)
    assert not fleet.rollout.running, f"{fleet.rollout}: {fleet.replicas}"
    done = fleet.rollout.phase is Phase.DONE
    kept, other = (NEW, OLD) if done else (OLD, NEW)
    assert fleet.replicas[kept].count("up") >= 1
    assert "up" not in fleet.replicas[other]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    POLICIES, st.integers(1, 4), EVENTS, st.integers(0, 1000), st.sampled_from(["undo", "broken", "errors"])
)
def test_what_is_undone_or_bad_always_returns_to_the_old_version(
    policy: RolloutPolicy, target: int, events: list[str], seed: int, how: str
) -> None:
    fleet = Fleet(policy, target, seed)
    if how == "broken":
        fleet.broken = "it does not load"
    for event in events:
        fleet.tick() if event == "tick" else fleet.happen(event)
    if how == "errors":
        if fleet.rollout.phase is not Phase.TESTING or "up" not in fleet.replicas[NEW]:
            return
        fleet.errors = 10**6
        fleet.tick()
    elif fleet.rollout.running and how == "undo":
        fleet.steer(lambda rollout: rollouts.undo(rollout, fleet.now))
    elif how == "undo":
        return
    fleet.calm(200)
    assert fleet.rollout.phase is Phase.RETURNED, f"{fleet.rollout}: {fleet.replicas}"
    assert fleet.replicas[OLD].count("up") >= 1
    assert fleet.replicas[NEW] == []
    assert fleet.rollout.reason


@settings(max_examples=60, deadline=None, derandomize=True)
@given(POLICIES, st.integers(1, 4), st.lists(st.integers(1, 5), max_size=20), st.integers(0, 1000))
def test_scaling_meanwhile_and_hands_that_meddle_do_no_harm(
    policy: RolloutPolicy, target: int, targets: list[int], seed: int
) -> None:
    fleet = Fleet(policy, target, seed)
    steps: list[Callable[[Rollout], Rollout]] = [
        rollouts.pause,
        lambda rollout: rollouts.resume(rollout, fleet.now),
        lambda rollout: rollouts.promote(rollout, fleet.now),
    ]
    for fleet.target in targets:
        fleet.steer(fleet.random.choice(steps))
        for _ in range(3):
            fleet.tick()
            fleet.happen(fleet.random.choice(["ready", "gone"]))
    if fleet.rollout.paused:
        fleet.steer(steps[1])
    fleet.calm(300)
    assert not fleet.rollout.running, f"{fleet.rollout}: {fleet.replicas}"


def test_a_paused_rollout_stays_as_it_is() -> None:
    fleet = Fleet(RolloutPolicy(strategy="surge"), 3, 0)
    fleet.tick()
    fleet.happen("ready")
    assert fleet.steer(rollouts.pause)
    fleet.calm(100)
    assert fleet.rollout.running
    assert fleet.replicas[NEW] == ["up"]
    assert fleet.replicas[OLD] == ["up"] * 2
    assert not fleet.steer(rollouts.pause) or fleet.rollout.paused
    assert fleet.steer(lambda rollout: rollouts.resume(rollout, fleet.now))
    fleet.calm(100)
    assert fleet.rollout.phase is Phase.DONE


def test_a_swap_cannot_pause_while_arrivals_are_held() -> None:
    fleet = Fleet(RolloutPolicy(strategy="swap"), 1, 0)
    assert fleet.tick().held
    with pytest.raises(ConflictError, match="it cannot pause while arrivals are held"):
        rollouts.pause(fleet.rollout)
    assert not fleet.steer(lambda rollout: rollouts.promote(rollout, fleet.now))


def test_auto_is_surge_where_there_is_room_and_swap_where_there_is_none() -> None:
    for room, phase in ((True, Phase.SHIFTING), (False, Phase.EMPTYING)):
        fleet = Fleet(RolloutPolicy(), 1, 0)
        fleet.room_for_two = room
        fleet.tick()
        assert fleet.rollout.phase is phase


def test_a_slow_start_of_many_is_not_late_while_it_gets_on() -> None:
    fleet = Fleet(RolloutPolicy(strategy="surge", ready_timeout_s=10), 4, 0)
    for _ in range(4):
        for _ in range(8):
            fleet.tick()
        fleet.calm(1)
    fleet.calm(20)
    assert fleet.rollout.phase is Phase.DONE


def test_undone_in_the_middle_the_old_ones_come_back_before_the_new_ones_go() -> None:
    fleet = Fleet(RolloutPolicy(strategy="surge"), 3, 0)
    fleet.calm(4)
    assert fleet.rollout.running
    assert "up" in fleet.replicas[NEW]
    assert len(fleet.replicas[OLD]) < 3
    assert fleet.steer(lambda rollout: rollouts.undo(rollout, fleet.now))
    fleet.calm(50)  # `Fleet` checks every stop
    assert fleet.rollout.phase is Phase.RETURNED
    assert (fleet.replicas[OLD], fleet.replicas[NEW]) == (["up"] * 3, [])
