"""Requests of a leaving version whose replica dies: what was begun is finished within the grace, in virtual time."""

from __future__ import annotations

import pytest

from fixtures.virtual_fleet import SURGE, World, deployment
from toque.errors import NotFoundError
from toque.fleet.placement.fake import Behaviour
from toque.fleet.spec import RolloutPolicy
from toque.routing.base import RoutingTable

OLD, NEW = "/models/v1", "/models/v2"
SWAP = RolloutPolicy(strategy="swap")


async def rolling(rollout: RolloutPolicy, load_s: float = 0.5, **world: int) -> World:
    """A rollout whose old replica finishes what it has, which would take it 4 of its 5 seconds."""
    made = World(lambda spec: Behaviour(load_s, drain_s=4.0), **world)
    await made.deploy(deployment(rollout=rollout))
    await made.run(load_s + 1)
    await made.admin.start_rollout("m", NEW)
    while "m-0" not in {replica_id for replica_id, _ in made.placement.stopped}:
        await made.run(0.25)
    assert states(made.table(), OLD) == ["draining"]
    return made


def states(table: RoutingTable, version: str) -> list[str]:
    return [entry.state.value for entry in table.entries if entry.version == version]


def strand(world: World, count: int) -> None:
    world.say("m", waiting=count, stranded={OLD: count} if count else {})


async def test_a_leaving_version_gets_a_replica_for_what_has_lost_its_own() -> None:
    world = await rolling(SURGE)
    assert world.table().leaving == (OLD,)
    world.placement.kill("m-0")
    strand(world, 2)
    await world.run(1)
    assert states(world.table(), OLD) == ["ready"]
    assert world.table().shares == {NEW: 1.0}
    assert (await world.admin.rollout("m")).phase == "shifting"
    assert len(world.placement.started) == 3
    strand(world, 0)  # they are there: nothing else is waited for
    await world.run(0.5)
    assert states(world.table(), OLD) == ["draining"]
    await world.run(4.5)
    assert (await world.admin.rollout("m")).phase == "done"
    assert world.resident() == ["m"]
    await world.run(2)
    assert world.table().leaving == ()
    assert list(world.table().versions) == [NEW]
    assert len(world.placement.started) == 3


async def test_its_replica_dies_too_and_another_one_comes_while_there_is_time() -> None:
    world = await rolling(SURGE, load_s=0.25)
    for _ in range(3):
        (process,) = (p for p in world.placement.processes.values() if OLD in p.spec.argv)
        world.placement.kill(process.spec.replica_id)
        strand(world, 1)
        await world.run(0.75)
        assert states(world.table(), OLD) == ["ready"]
    strand(world, 0)
    await world.run(6)
    assert (await world.admin.rollout("m")).phase == "done"


async def test_where_there_is_room_for_one_the_new_version_waits_for_it() -> None:
    world = await rolling(SWAP, memory_mb=150)
    world.placement.kill("m-0")
    for _ in range(4):  # the gateways' reports are on their way
        await world.run(0.25)
        assert len(world.placement.started) == 1
        assert world.table().held
    strand(world, 1)
    await world.run(1)
    assert states(world.table(), OLD) == ["ready"]
    assert world.table().held
    strand(world, 0)
    await world.run(6)
    assert world.serving() == [NEW]
    assert world.placement.most == 1
    assert (await world.admin.rollout("m")).phase == "done"


async def test_nobody_waits_longer_than_it_takes_to_hear_that_nothing_was_lost() -> None:
    world = await rolling(SWAP, memory_mb=150)
    world.placement.kill("m-0")
    await world.run(3)
    assert world.serving() == [NEW]


async def test_who_finishes_by_itself_holds_up_nothing() -> None:
    world = await rolling(SWAP, memory_mb=150)
    died_at = world.placement.now
    while world.serving() != [NEW]:
        await world.run(0.25)
    assert world.placement.now - died_at <= 4.0 + 0.5 + 0.5  # to finish, to load, to look


async def test_what_cannot_be_finished_within_the_grace_is_given_up() -> None:
    world = await rolling(SURGE)
    world.placement.behaviour = lambda spec: Behaviour(load_s=1000)
    world.placement.kill("m-0")
    strand(world, 1)
    await world.run(3)
    assert states(world.table(), OLD) == ["starting"]
    assert world.table().leaving == (OLD,)
    await world.run(3)
    assert world.table().leaving == ()
    assert OLD not in world.table().versions
    assert (await world.admin.rollout("m")).phase == "done"


async def test_a_deployment_that_is_stopped_or_deleted_finishes_too() -> None:
    for deleted in (False, True):
        world = World(lambda spec: Behaviour(load_s=0.5, drain_s=4.0))
        await world.deploy(deployment())
        await world.run(1)
        await (world.admin.delete if deleted else world.admin.stop)("m")
        await world.run(0.5)
        world.placement.kill("m-0")
        await world.run(0.5)
        strand(world, 1)
        await world.run(1)
        assert states(world.table(), OLD) == ["ready"]
        assert world.table().shares == {}
        assert world.table().reason == ("deleted" if deleted else "stopped by request")
        strand(world, 0)
        await world.run(6)
        assert world.resident() == []
        if deleted:
            assert world.tables == {}
            with pytest.raises(NotFoundError):
                await world.admin.deployment("m")
        else:
            assert states(world.table(), OLD) == ["dead"]


async def test_who_takes_over_meanwhile_loses_nothing() -> None:
    world = await rolling(SURGE)
    first, world.controller = world.controller, world.another("two")
    await first.close()
    await world.run(1)
    world.placement.kill("m-0")
    strand(world, 1)
    await world.run(1)
    assert "ready" in states(world.table(), OLD)
    strand(world, 0)
    await world.run(6)
    assert (await world.admin.rollout("m")).phase == "done"


async def test_a_version_that_is_wanted_again_leaves_no_more() -> None:
    world = await rolling(SURGE)
    await world.admin.undo("m")
    while world.serving() != [OLD]:
        await world.run(0.25)
    assert OLD not in world.table().leaving
    await world.run(5)
    assert (await world.admin.rollout("m")).phase == "returned"
