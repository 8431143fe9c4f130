"""Rollouts as the controller carries them out, in virtual time, on a placement that only pretends."""

from __future__ import annotations

import pytest

from fixtures.virtual_fleet import TO_ZERO, World, deployment
from toque.errors import ConflictError
from toque.fleet.placement.fake import Behaviour
from toque.fleet.spec import RolloutPolicy, ScalingPolicy
from toque.routing.base import ReplicaState, VersionOutcomes


def counted(requests: int, errors: int = 0) -> VersionOutcomes:
    return VersionOutcomes(requests, errors, requests - errors)


async def test_surge_shifts_without_ever_having_fewer() -> None:
    world = World(lambda spec: Behaviour(load_s=1.0, drain_s=2.0))
    await world.deploy(deployment(scaling=ScalingPolicy(min_replicas=3, max_replicas=3)))
    await world.run(2)
    world.history.clear()
    view = await world.admin.start_rollout("m", "/models/v2")
    assert (view.old, view.new, view.running) == ("v1", "v2", True)
    with pytest.raises(ConflictError, match="is rolling out"):
        await world.admin.start_rollout("m", "/models/v3")
    await world.run(30)
    assert world.serving() == ["/models/v2"] * 3
    assert world.table().shares == {"/models/v2": 1.0}
    assert world.placement.most == 4
    for tables in world.history:
        assert sum(e.state is ReplicaState.READY for e in tables["m"].entries) >= 3
    row = await world.admin.deployment("m")
    assert (row.version, row.status, row.generation) == ("v2", "ready", row.observed_generation)
    back = await world.admin.undo("m")
    assert (back.old, back.new) == ("v2", "v1")
    await world.run(30)
    assert world.serving() == ["/models/v1"] * 3


async def test_a_version_that_does_not_start_is_rolled_back() -> None:
    world = World(lambda spec: Behaviour(refuse="bad file" if "/models/v2" in spec.argv else ""))
    await world.deploy(deployment())
    await world.run(1)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(3)
    view = await world.admin.rollout("m")
    assert (view.phase, view.reason) == ("returned", "the new version does not start: bad file")
    assert world.serving() == ["/models/v1"]
    assert world.resident() == ["m"]
    assert (await world.admin.deployment("m")).spec.model == "/models/v1"


async def test_a_version_that_is_not_ready_in_time_is_rolled_back() -> None:
    world = World(lambda spec: Behaviour(load_s=1000 if "/models/v2" in spec.argv else 0))
    await world.deploy(deployment(rollout=RolloutPolicy(strategy="surge", ready_timeout_s=20)))
    await world.run(1)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(22)
    assert (await world.admin.rollout("m")).reason == "the new version was not ready after 20 s"
    assert world.serving() == ["/models/v1"]


CANARY = RolloutPolicy(strategy="canary", steps=(0.1, 0.5), step_s=5.0, min_requests=20)


async def test_a_good_canary_goes_up_its_steps() -> None:
    world = World()
    await world.deploy(deployment(rollout=CANARY))
    await world.run(2)
    await world.admin.start_rollout("m", "/models/v2")
    seen = []
    for second in range(40):
        world.say(
            "m",
            running=1,
            outcomes={
                "/models/v1": counted(100 * second, second),
                "/models/v2": counted(max(0, second - 3) * 10),
            },
        )
        await world.run(1)
        share = world.table().shares.get("/models/v2", 0.0)
        assert sum(world.table().shares.values()) == pytest.approx(1.0)
        if share not in seen:
            seen.append(share)
    assert seen == [0.1, 0.5, 1.0]
    assert world.serving() == ["/models/v2"]


async def test_a_canary_that_fails_requests_goes_back() -> None:
    world = World()
    await world.deploy(deployment(rollout=CANARY))
    await world.run(2)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(2)
    world.say("m", outcomes={"/models/v1": counted(200), "/models/v2": counted(7, 5)})
    await world.run(1)
    assert world.table().shares == {"/models/v1": 1.0}
    await world.run(3)
    view = await world.admin.rollout("m")
    assert (view.phase, view.replicas) == ("returned", {"v1": 1, "v2": 0})
    assert view.reason.startswith("5 of 7 requests failed on the new version, 0.0% on the old one")
    assert world.serving() == ["/models/v1"]


async def test_pause_and_promote() -> None:
    world = World()
    await world.deploy(deployment(rollout=CANARY))
    await world.run(2)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(2)
    await world.admin.pause("m")
    world.say("m", outcomes={"/models/v1": counted(200), "/models/v2": counted(70)})
    await world.run(60)
    assert world.table().shares == pytest.approx({"/models/v2": 0.1, "/models/v1": 0.9})
    await world.admin.promote("m")
    await world.run(3)
    assert world.table().shares == {"/models/v2": 1.0}
    with pytest.raises(ConflictError, match="is over"):
        await world.admin.pause("m")


async def test_swap_in_place_never_has_two_and_holds_arrivals_meanwhile() -> None:
    world = World(lambda spec: Behaviour(load_s=1.0, drain_s=2.0), memory_mb=150)
    await world.deploy(deployment(rollout=RolloutPolicy()))  # auto: there is no room for two
    await world.run(2)
    world.history.clear()
    world.say("m", waiting=3)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(6)
    assert world.placement.most == 1
    assert world.serving() == ["/models/v2"]
    held = [tables["m"].held for tables in world.history]
    assert any(held)
    assert not held[-1]
    assert not any(tables["m"].asleep for tables in world.history)
    assert (await world.admin.rollout("m")).strategy == "swap"


async def test_a_swap_to_what_does_not_start_restores_the_old_version() -> None:
    world = World(lambda spec: Behaviour(load_s=0.5, refuse="bad file" if "/models/v2" in spec.argv else ""))
    await world.deploy(deployment(rollout=RolloutPolicy(strategy="swap")))
    await world.run(2)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(5)
    view = await world.admin.rollout("m")
    assert (view.phase, view.reason) == ("returned", "the new version does not start: bad file")
    assert world.serving() == ["/models/v1"]
    assert not world.table().held


async def test_a_rolling_restart_changes_engine_options_of_every_replica() -> None:
    world = World()
    await world.deploy(deployment(scaling=ScalingPolicy(min_replicas=2, max_replicas=2)))
    await world.run(2)
    await world.admin.restart("m", {"max_sequences": 4})
    await world.run(10)
    first = world.serving()
    assert len(first) == 2
    assert world.table().versions[first[0]].engine == {"max_sequences": 4}
    assert (await world.admin.deployment("m")).spec.engine == {"max_sequences": 4}
    await world.admin.restart("m")  # with the same options: a restart all the same
    await world.run(10)
    assert len(world.placement.started) == 6
    await world.admin.restart("m", {"max_sequences": None})
    await world.run(10)
    assert (await world.admin.deployment("m")).spec.engine == {}


async def test_a_sleeping_deployment_proves_its_new_version_and_sleeps_again() -> None:
    world = World()
    await world.deploy(deployment(scaling=TO_ZERO))
    await world.run(1)
    await world.admin.start_rollout("m", "/models/v2")
    await world.run(3)
    assert (await world.admin.deployment("m")).version == "v2"
    await world.run(15)
    assert world.resident() == []
    assert len(world.placement.started) == 1
