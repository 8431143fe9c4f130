"""The supervisor against a placement that only pretends, and its judgement without any process or clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from toque.fleet.placement.base import Event, EventKind, Node, Observed, ReplicaSpec
from toque.fleet.restart import RestartPolicy
from toque.fleet.supervisor import HangBounds, Health, Supervisor, _Life
from toque.routing.base import ReplicaEntry, ReplicaState

READY = Health(ReplicaState.READY)


@dataclass
class FakePlacement:
    """Processes are rows in a dictionary; ``end`` ends one."""

    rows: dict[str, Observed] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    stopped: list[tuple[int, float]] = field(default_factory=list)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    fail_at_start: int | None = None

    async def capacity(self) -> list[Node]:
        return []

    async def ensure(self, spec: ReplicaSpec) -> None:
        self.started.append(spec.epoch)
        self.rows[spec.replica_id] = Observed(
            spec.replica_id,
            spec.epoch,
            spec.address,
            "1",
            self.fail_at_start,
            "bad file" if self.fail_at_start else "",
        )

    async def stop(self, replica_id: str, epoch: int, grace_s: float) -> None:
        self.stopped.append((epoch, grace_s))
        self.rows.pop(replica_id, None)

    async def list(self) -> list[Observed]:
        return [*self.rows.values()]

    async def watch(self) -> AsyncIterator[Event]:
        while True:
            yield await self.events.get()

    def end(self, status: int, error: str) -> None:
        (row,) = self.rows.values()
        self.rows[row.replica_id] = replace(row, exit_status=status, last_error=error)
        self.events.put_nowait(Event(row.replica_id, row.epoch, EventKind.EXITED))


def spec_of(epoch: int) -> ReplicaSpec:
    return ReplicaSpec("a", epoch, ["x"], f"/a.{epoch}")


@dataclass
class Watched:
    placement: FakePlacement = field(default_factory=FakePlacement)
    health: Health | None = READY
    history: list[ReplicaEntry] = field(default_factory=list)

    def supervisor(self, policy: RestartPolicy | None = None, bounds: HangBounds | None = None) -> Supervisor:
        self.it = Supervisor(
            "a",
            self.placement,
            spec_of,
            lambda entry: self.health,
            on_change=lambda: self.history.append(self.it.entry),
            policy=policy or RestartPolicy(first_delay_s=0.01, max_delay_s=0.02),
            bounds=bounds,
        )
        return self.it


async def until(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition()


async def test_a_dead_replica_is_replaced_under_a_new_epoch_and_address() -> None:
    watched = Watched()
    supervisor = watched.supervisor()
    supervisor.start()
    await until(lambda: watched.placement.started == [1])
    await asyncio.sleep(0.02)
    watched.placement.end(-9, "killed by SIGKILL")
    await until(lambda: watched.placement.started == [1, 2])
    assert supervisor.entry.address == "/a.2"
    assert supervisor.entry.reason == "restarted after: killed by SIGKILL"
    await supervisor.stop(7)
    assert watched.placement.stopped[-1][0] == 2
    assert watched.placement.stopped[-1][1] >= 7
    assert [e.state for e in watched.history[-2:]] == [ReplicaState.DRAINING, ReplicaState.DEAD]


async def test_a_refused_model_is_shown_and_still_tried_again() -> None:
    watched = Watched(health=Health(ReplicaState.STARTING))
    watched.placement.fail_at_start = 2
    supervisor = watched.supervisor()
    supervisor.start()
    await until(lambda: len(watched.placement.started) >= 3)
    dead = [e for e in watched.history if e.state is ReplicaState.DEAD]
    assert {e.reason for e in dead} == {"bad file"}
    watched.placement.fail_at_start = None
    await until(lambda: watched.placement.rows and supervisor.entry.state is ReplicaState.STARTING)
    await supervisor.stop(0)


async def test_a_silent_replica_is_killed_and_replaced() -> None:
    watched = Watched(health=Health(ReplicaState.DEGRADED, silent_s=99))
    supervisor = watched.supervisor(bounds=HangBounds(silent_s=0.3))
    supervisor.start()
    await until(lambda: len(watched.placement.started) >= 2)
    assert watched.placement.stopped[0] == (1, 0.0)
    assert "it hung: nothing heard" in supervisor.entry.reason
    await supervisor.stop(0)


def judge(life: _Life, start: float, end: float, health: Health | None) -> str:
    """The last word after looking four times a second."""
    now, word = start, ""
    while now <= end and not word:
        word = life.judge(now, health)
        now += 0.25
    return word


@pytest.mark.parametrize(
    ("health", "seconds", "expected"),
    [
        (Health(ReplicaState.DEGRADED, silent_s=5), 100, "no step finished for 60 s"),
        (Health(ReplicaState.DEGRADED), 50, ""),
        (Health(ReplicaState.DEGRADED, silent_s=7), 30, "nothing heard for 6 s"),
        (Health(ReplicaState.DEAD), 5, "session was lost"),
        (Health(ReplicaState.DEAD), 1, ""),
        (Health(ReplicaState.STARTING), 1000, ""),
        (READY, 1000, ""),
        (None, 1000, ""),
    ],
)
def test_what_is_a_hang(health: Health | None, seconds: float, expected: str) -> None:
    word = judge(_Life(HangBounds()), 0, seconds, health)
    assert expected in word
    assert bool(expected) == bool(word)


def test_a_state_that_changed_starts_anew() -> None:
    life = _Life(HangBounds())
    assert not judge(life, 0, 50, Health(ReplicaState.DEGRADED))
    assert not judge(life, 50.25, 51, READY)
    assert not judge(life, 51.25, 100, Health(ReplicaState.DEGRADED))


def test_nobody_is_blamed_for_our_own_sleep() -> None:
    """After we were stopped for a minute, what the replica said meanwhile is yet to be read."""
    life = _Life(HangBounds())
    assert not judge(life, 0, 1, READY)
    assert life.judge(61, Health(ReplicaState.DEGRADED, silent_s=60)) == ""
    assert not judge(life, 61.25, 62, READY)
    assert life.ready_s() == pytest.approx(62, abs=0.3)


@pytest.mark.parametrize("turns", range(5))
async def test_a_stop_that_comes_together_with_an_event_is_not_forgotten(turns: int) -> None:
    watched = Watched()
    supervisor = watched.supervisor()
    supervisor.start()
    await until(lambda: supervisor.entry.address)
    await asyncio.sleep(0.05)
    supervisor.stir()
    for _ in range(turns):
        await asyncio.sleep(0)
    stopping = asyncio.get_running_loop().create_task(supervisor.stop(0.0))
    done, _ = await asyncio.wait([stopping], timeout=2)
    assert done
    assert supervisor.entry.state is ReplicaState.DEAD
