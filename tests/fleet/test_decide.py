"""What a round of the controller decides, where it is not stored."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from toque.fleet.decide import Decider
from toque.fleet.health import HangBounds
from toque.fleet.placement.base import Observed
from toque.fleet.store import ReplicaRow
from toque.routing.base import ReplicaState


def test_a_death_whose_round_was_not_stored_counts_once() -> None:
    """Another writer was first, so the round is decided again on the same rows: one death is no crash loop."""
    decider = Decider(HangBounds())
    row = ReplicaRow("m-0", "m", "/models/v1", epoch=3, address="/s", started_at=0.5)
    dead = Observed("m-0", 3, "/s", "77", exit_status=9, last_error="exit status 9")

    def decide(now: float) -> ReplicaRow:
        found = decider._live(row, dead, None, now, now)
        assert found is not None
        return found

    first = decide(1.0)
    assert (first.state, first.restarts) == (ReplicaState.STARTING, 1)
    assert decide(2.0) == decide(3.0) == first


@pytest.mark.parametrize(("loaded", "expected"), [(True, ReplicaState.STARTING), (False, ReplicaState.DEAD)])
def test_deaths_of_loaded_processes_that_nobody_heard_are_no_crash_loop(
    loaded: bool, expected: ReplicaState
) -> None:
    """A request that waited may kill each process before the controller's own session has heard it be ready."""
    decider = Decider(HangBounds())
    row = ReplicaRow("m-0", "m", "/models/v1", epoch=3, address="/s", started_at=0.5)
    dead = Observed("m-0", 3, "/s", "77", exit_status=9, last_error="exit status 9", loaded=loaded)
    states = []
    for epoch in (3, 4):
        again = msgspec.structs.replace(row, epoch=epoch)
        after = decider._live(again, replace(dead, epoch=epoch), None, float(epoch), float(epoch))
        states.append(after and after.state)
    assert states == [ReplicaState.STARTING, expected]
