"""Everything at once, in virtual time: whatever happens in whatever order, the promises hold, and calm comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.virtual_fleet import World, deployment
from toque.errors import ConflictError, NotFoundError
from toque.fleet.placement.base import ReplicaSpec
from toque.fleet.placement.fake import Behaviour
from toque.fleet.spec import RolloutPolicy, ScalingPolicy
from toque.routing.base import ReplicaState, VersionOutcomes

LIMIT_MB = 500
EACH_MB = 100
NAMES = ("a", "b", "c")
EVENTS = (
    "kill", "silence", "wait", "strand", "work", "idle", "good", "bad", "undo", "pause", "resume", "promote", "scale",
    "zero", "stop", "start", "restart", "takeover", "time",
)  # fmt: skip


class Chaos:
    """A world, what may happen in it, and what has to be true all the time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.calm = False
        self.world = World(self._behaviour, memory_mb=LIMIT_MB)
        self.holders = 1

    def _behaviour(self, spec: ReplicaSpec) -> Behaviour:
        if "/models/bad" in spec.argv:
            return Behaviour(load_s=0.5, refuse="it does not load")
        return Behaviour(load_s=self.random.choice((0, 1, 3)), drain_s=self.random.choice((0, 1, 4)))

    async def happen(self, event: str) -> None:
        name = self.random.choice(NAMES)
        admin, placement = self.world.admin, self.world.placement
        living = [key for key, process in placement.processes.items() if process.exit_status is None]
        policy = RolloutPolicy(
            strategy=self.random.choice(("auto", "surge", "canary", "swap")),
            steps=(0.5,),
            step_s=1.0,
            min_requests=5,
            ready_timeout_s=20,
        )
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "good": lambda: admin.start_rollout(name, f"/models/v{self.random.randint(1, 3)}", policy),
            "bad": lambda: admin.start_rollout(name, "/models/bad", policy),
            "undo": lambda: admin.undo(name),
            "pause": lambda: admin.pause(name),
            "resume": lambda: admin.resume(name),
            "promote": lambda: admin.promote(name),
            "scale": lambda: admin.scale(name, self.random.randint(1, 2), 2),
            "zero": lambda: admin.scale(name, 0, 2),
            "stop": lambda: admin.stop(name),
            "start": lambda: admin.start(name),
            "restart": lambda: admin.restart(name, {"max_sequences": self.random.randint(1, 9)}),
        }
        if event == "bad" and (await self.world.store.deployments())[name].stopped:
            return  # nothing runs to compare it with: it is what was asked for
        if event in asked:
            with suppress(ConflictError, NotFoundError):
                await asked[event]()
        elif event == "kill" and living:
            placement.kill(self.random.choice(living))
        elif event == "silence" and living:
            placement.silence(self.random.choice(living))
        elif event == "wait":
            self.world.say(name, waiting=self.random.randint(1, 20))
        elif event == "strand":  # requests whose replica died, of any version
            versions = self.world.tables[name].versions if name in self.world.tables else {}
            stranded = {self.random.choice(sorted(versions)): 2} if versions else {}
            self.world.say(name, waiting=2, stranded=stranded)
        elif event == "work":
            self._work(name)
        elif event == "idle":
            self.world.say(name, idle_s=1000.0)
        elif event == "takeover":
            self.holders += 1
            self.world.controller = self.world.another(f"holder{self.holders}", LIMIT_MB)
        await self.run(10 if event in ("takeover", "time") else 0.5)

    def _work(self, name: str) -> None:
        """Requests that go well, on every version there is."""
        table = self.world.tables.get(name)
        counted = VersionOutcomes(round(self.world.placement.now), 0, round(self.world.placement.now))
        self.world.say(name, running=1, outcomes=dict.fromkeys(table.versions if table else (), counted))

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.world.report()
            while not await self.world.controller.round():
                pass
            await self.world.placement.pass_time(0.5)
            self.check()

    def check(self) -> None:
        processes = self.world.placement.processes.values()
        living = sum(process.exit_status is None for process in processes)
        assert living * EACH_MB <= LIMIT_MB
        for table in self.world.tables.values():
            if table.shares:
                assert sum(table.shares.values()) == pytest.approx(1.0)
            assert all(key in table.versions for key in table.shares)
            keys = [(entry.replica_id, entry.epoch) for entry in table.entries]
            assert len(set(keys)) == len(keys)
            assert all(entry.version in table.versions for entry in table.entries if entry.epoch)
            assert not (table.asleep and any(e.state is ReplicaState.READY for e in table.entries))


async def live(seed: int, events: list[str]) -> None:
    chaos = Chaos(seed)
    world = chaos.world
    await world.deploy(
        *(
            deployment(
                name,
                scaling=ScalingPolicy(min_replicas=1, max_replicas=2),
                rollout=RolloutPolicy(
                    strategy="surge", ready_timeout_s=20.0
                ),  # also where there is no room for it
            )
            for name in NAMES
        )
    )
    await chaos.run(1)
    for event in events:
        await chaos.happen(event)
    world.signals.clear()
    for name in NAMES:  # whoever holds something lets it go
        for step in (world.admin.start, world.admin.resume):
            with suppress(ConflictError, NotFoundError):
                await step(name)
        chaos._work(name)
    for _ in range(8):
        await chaos.run(10)
        for name in NAMES:
            chaos._work(name)
    for name, row in (await world.store.deployments()).items():
        told = f"{name}: {row}, {world.tables[name]}"
        assert row.rollout is None or not row.rollout.running, told
        assert row.observed_generation == row.generation, told
        ready = [entry for entry in world.tables[name].entries if entry.state is ReplicaState.READY]
        assert len(ready) == len(world.tables[name].entries), told
        assert len(ready) == row.target or row.reason.startswith("no room"), told
        assert row.target <= 2, told
        assert row.target >= row.spec.scaling.min_replicas or "room for" in row.reason, told
        assert all(entry.version == row.current for entry in ready), told
        assert row.current != "/models/bad", told
        if ready:
            assert world.tables[name].shares == {row.current: 1.0}, told
    rows = {(row.id, row.epoch) for row in world.controller.replicas.values()}
    assert {(key, process.spec.epoch) for key, process in world.placement.processes.items()} == rows


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(EVENTS), max_size=25))
def test_whatever_happens_the_promises_hold_and_calm_comes_back(seed: int, events: list[str]) -> None:
    asyncio.run(live(seed, events))
