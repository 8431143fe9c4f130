"""The controller in virtual time, on a placement that only pretends."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from fixtures.virtual_fleet import TO_ZERO, World, deployment
from toque.errors import ConflictError
from toque.fleet.controller import Controller
from toque.fleet.placement.base import ReplicaSpec
from toque.fleet.placement.fake import Behaviour
from toque.fleet.spec import RolloutPolicy, ScalingPolicy
from toque.fleet.store import DeploymentRow
from toque.routing.base import ReplicaState
from toque.types import EngineStats


async def test_a_deployment_gets_its_replicas_and_their_table() -> None:
    world = World()
    await world.deploy(deployment(scaling=ScalingPolicy(min_replicas=2, max_replicas=2)))
    await world.run(0.5)
    assert world.states() == ["starting", "starting"]
    await world.run(1.5)
    assert world.states() == ["ready", "ready"]
    assert world.table().shares == {"/models/v1": 1.0}
    assert world.table().versions["/models/v1"].label == "v1"
    assert not world.table().asleep
    before = world.controller.rounds, len(world.history)
    await world.run(5)
    assert len(world.history) == before[1]  # nothing changes, nothing is written


async def test_a_dead_replica_is_replaced_at_once_under_a_higher_epoch() -> None:
    world = World()
    await world.deploy(deployment())
    await world.run(2)
    (before,) = world.table().entries
    world.placement.kill("m-0")
    await world.look()
    (after,) = world.table().entries
    assert (after.replica_id, after.state) == ("m-0", ReplicaState.STARTING)
    assert after.epoch > before.epoch
    assert after.address != before.address
    assert after.reason == "restarted after: ended with -9"
    await world.run(2)
    assert world.states() == ["ready"]


async def test_a_silent_replica_is_killed_and_replaced_within_six_seconds() -> None:
    world = World()
    await world.deploy(deployment())
    await world.run(2)
    world.placement.silence("m-0")
    await world.run(6)
    assert len(world.placement.started) == 2
    assert "hung: nothing heard" in world.table().entries[0].reason
    await world.run(2)
    assert world.states() == ["ready"]


async def test_a_model_that_cannot_load_is_shown_and_tried_less_and_less() -> None:
    world = World(lambda spec: Behaviour(load_s=0.1, refuse="tensor 7 is cut off"))
    await world.deploy(deployment())
    await world.run(60)
    (entry,) = world.table().entries
    assert (entry.state, entry.reason) == (ReplicaState.DEAD, "tensor 7 is cut off")
    assert 6 <= len(world.placement.started) <= 9
    assert (await world.admin.deployment("m")).status == "failed"
    world.placement.behaviour = lambda spec: Behaviour()
    await world.run(31)
    assert world.states() == ["ready"]


async def test_fewer_replicas_drain_within_the_grace() -> None:
    world = World(lambda spec: Behaviour(drain_s=3.0))
    await world.deploy(deployment(scaling=ScalingPolicy(min_replicas=3, max_replicas=3)))
    await world.run(1)
    await world.admin.scale("m", 1, 1)
    await world.look()
    assert world.states() == ["draining", "draining", "ready"]
    await world.run(4)
    assert world.states() == ["ready"]
    assert len(world.placement.stopped) == 2


async def test_stopped_and_deleted_deployments_have_no_replicas() -> None:
    world = World(lambda spec: Behaviour(drain_s=2.0))
    await world.deploy(deployment("a"), deployment("b"))
    await world.run(1)
    await world.admin.stop("a")
    await world.admin.delete("b")
    await world.look()
    assert world.tables["a"].shares == {}
    await world.run(3)
    assert world.resident() == []
    assert set(world.tables) == {"a"}
    assert world.table("a").entries[0].state is ReplicaState.DEAD
    assert world.table("a").entries[0].reason == "stopped by request"
    world.say("a", waiting=1)
    await world.run(1)
    assert world.resident() == []
    await world.admin.start("a")
    await world.run(1)
    assert world.states("a") == ["ready"]
    assert [view.name for view in await world.admin.deployments()] == ["a"]


# To zero and back


async def test_an_idle_deployment_goes_to_sleep_and_twenty_requests_start_one() -> None:
    world = World()
    await world.deploy(deployment(scaling=TO_ZERO))
    await world.run(2)
    assert world.resident() == []  # at least 0: nothing is started that nobody asked for
    assert world.table().asleep
    world.say("m", waiting=20, waiting_s=0.01)
    await world.look()
    assert len(world.placement.started) == 1
    assert not world.table().asleep
    await world.run(2)
    world.say("m", running=20)
    await world.run(30)
    assert len(world.placement.started) == 1
    world.say("m", idle_s=0.0)
    await world.run(9)
    assert world.states() == ["ready"]
    world.say("m", idle_s=11.0)
    await world.run(3)
    assert world.resident() == []
    assert world.table().asleep


async def test_nothing_is_put_to_sleep_while_a_replica_works() -> None:
    """Also where the gateway that has the request is not heard."""
    world = World()
    await world.deploy(deployment(scaling=TO_ZERO))
    world.say("m", waiting=1)
    await world.run(2)
    world.signals.clear()
    world.placement.processes["m-0"].stats = EngineStats(running=1)
    await world.run(30)
    assert world.states() == ["ready"]
    world.placement.processes["m-0"].stats = EngineStats()
    await world.run(12)
    assert world.resident() == []


async def test_a_request_in_the_instant_of_falling_asleep_is_answered() -> None:
    world = World(lambda spec: Behaviour(load_s=1.0, drain_s=2.0))
    await world.deploy(deployment(scaling=TO_ZERO))
    world.say("m", waiting=1)
    await world.run(2)
    world.say("m", idle_s=60.0)
    while world.states() == ["ready"]:
        await world.run(0.25)
    assert world.states() == ["draining"]
    world.say("m", waiting=1)  # it came in that moment, and the draining replica refused it
    await world.run(1.5)
    assert world.states() == ["draining", "ready"]
    assert len(world.placement.started) == 2


# Memory


async def test_twenty_models_with_room_for_three() -> None:
    world = World(memory_mb=300)
    names = [f"m{n:02}" for n in range(20)]
    await world.deploy(*(deployment(name) for name in names))
    await world.run(2)
    assert world.resident() == ["m00", "m01", "m02"]
    assert world.table("m07").asleep
    assert world.table("m07").reason == "no room: a replica of m07 takes 100 MB, 0 of 300 MB are free"
    for name in names[::-1]:
        world.signals.clear()
        world.say(name, waiting=1)
        await world.run(1.5)
        world.say(name, running=1)
        await world.run(1)
        world.say(name, idle_s=0.0)
        await world.run(0.5)
        assert world.states(name) == ["ready"]
        assert len(world.resident()) == 3
    assert world.resident() == ["m00", "m01", "m02"]  # the least recently used ones had to go
    assert world.placement.most == 3
    assert (await world.admin.deployment("m19")).status == "asleep"


async def test_who_works_or_may_not_sleep_is_left_alone() -> None:
    world = World(memory_mb=300)
    await world.deploy(
        deployment("works"), deployment("stays", evictable=False), deployment("waits", memory_mb=200)
    )
    await world.run(2)
    world.say("works", running=1)
    world.say("waits", waiting=1)
    await world.run(5)
    assert world.resident() == ["stays", "works"]
    assert world.table("waits").reason == "no room: a replica of waits takes 200 MB, 100 of 300 MB are free"
    world.say("works", idle_s=1.0)
    await world.run(2)
    assert world.resident() == ["stays", "waits"]
    assert (await world.admin.deployment("works")).reason.startswith("no room: ")


async def test_what_never_fits_is_refused_with_the_numbers() -> None:
    world = World(memory_mb=300)
    await world.deploy(deployment(memory_mb=301))
    world.say("m", waiting=1)
    await world.run(1)
    (entry,) = world.table().entries
    assert entry.state is ReplicaState.DEAD
    assert entry.reason == "no room: a replica of m takes 301 MB, more than the 300 MB for all replicas"
    assert not world.table().asleep


# Who leads


async def test_a_standby_takes_over_in_the_middle_of_a_rollout_and_adopts_what_runs() -> None:
    world = World()
    await world.deploy(deployment(scaling=ScalingPolicy(min_replicas=2, max_replicas=2)))
    await world.run(2)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(1)
    standby = world.another("two")
    assert await standby.round()
    assert not leads(standby)
    started = list(world.placement.started)
    died_at, world.controller = world.placement.now, standby  # the first one is killed: it does nothing more
    while not leads(standby):
        await world.run(0.25)
    assert world.placement.now - died_at <= 10
    assert world.placement.started[: len(started)] == started
    await world.run(15)
    assert world.serving() == ["/models/v2"] * 2
    assert max(epoch for _, epoch in world.placement.started) > 1_000_000
    assert (
        len(world.placement.started) == 4
    )  # two of the old one, two of the new one: nothing was started twice


async def test_a_controller_without_the_lease_does_nothing() -> None:
    world = World()
    await world.deploy(deployment())
    await world.run(2)
    stale, world.controller = world.controller, world.another("two")
    await world.placement.pass_time(9)
    await world.look()
    world.placement.kill("m-0")
    assert await stale.round()
    assert len(world.placement.started) == 1
    await world.look()
    assert len(world.placement.started) == 2


async def test_a_process_that_is_nobodys_is_ended() -> None:
    world = World()
    await world.placement.ensure(ReplicaSpec("ghost-0", 7, ["x"], "/x"))
    await world.deploy(deployment())
    await world.run(2)
    assert world.resident() == ["m"]


async def test_a_change_in_between_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.deploy(deployment())
    read = world.store.deployments

    async def meanwhile() -> dict[str, DeploymentRow]:
        rows = await read()
        await world.store.put(replace(rows["m"], stopped=True, generation=2))
        return rows

    monkeypatch.setattr(world.store, "deployments", meanwhile)
    assert not await world.controller.round()
    monkeypatch.undo()
    await world.run(1)
    assert world.placement.started == []


def leads(controller: Controller) -> bool:
    return controller.leading


@pytest.mark.parametrize("turns", range(5))
async def test_a_stop_that_comes_together_with_an_event_is_not_forgotten(turns: int) -> None:
    world = World()
    await world.deploy(deployment())
    world.controller.start()
    await asyncio.sleep(0.05)
    world.controller.stir()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await world.controller.close()
    rounds = world.controller.rounds
    world.controller.stir()
    await asyncio.sleep(0.01)
    assert world.controller.rounds == rounds


async def test_what_is_deployed_again_as_it_is_changes_nothing() -> None:
    world = World()
    await world.deploy(deployment())
    await world.run(2)
    before = (await world.store.deployments())["m"]
    await world.admin.deploy(deployment())
    assert (await world.store.deployments())["m"] == replace(before, stamp=before.stamp + 1)
    view = await world.admin.deploy(deployment(memory_mb=200))
    assert (view.generation, view.rollout) == (2, None)
    await world.run(1)
    assert len(world.placement.started) == 1
    view = await world.admin.deploy(deployment(model="/models/v2"))
    assert view.rollout is not None
    assert (view.rollout.old, view.rollout.new) == ("v1", "v2")
    await world.admin.delete("m")
    with pytest.raises(ConflictError, match="is being deleted"):
        await world.admin.deploy(deployment())


async def test_what_happens_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "toque.fleet")
    world = World(memory_mb=100)
    await world.deploy(deployment("a"), deployment("b"))
    await world.run(2)
    world.placement.kill("a-0")
    await world.run(2)
    world.say("b", waiting=1)
    await world.run(2)
    await world.admin.start_rollout("b", "/models/v2", RolloutPolicy(strategy="swap"))
    await world.run(3)  # the room of the old version is kept for the new one, though a wants it
    assert world.resident() == ["b"]
    assert caplog.messages == [
        "b: no room: a replica of b takes 100 MB, 0 of 100 MB are free",
        "replica a-0 restarted after: ended with -9",
        "a: 0 replicas instead of 1: put to sleep to make room for b",
        "a: no room: a replica of a takes 100 MB, 0 of 100 MB are free and 100 MB are being freed",
        "b: rollout v1 to v2: emptying",
        "b: rollout v1 to v2: loading",
        "b: rollout v1 to v2: done",
    ]


async def test_a_clock_that_is_set_back_makes_no_restart_wait() -> None:
    world = World(lambda spec: Behaviour(refuse="bad file"))
    await world.deploy(deployment())
    await world.run(5)
    started = len(world.placement.started)
    world.placement.now -= 3600
    world.placement.behaviour = lambda spec: Behaviour()
    await world.run(1)
    assert len(world.placement.started) == started + 1
