"""An alias moves: what deployments that follow it are offered, and which of them take it by themselves."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from fixtures.virtual_fleet import World, deployment
from toque.errors import DownloadError, NotFoundError
from toque.fleet.admin import Edit
from toque.fleet.durable import DurableFleet
from toque.fleet.embedded import LocalFleet
from toque.fleet.following import RETRY_S, Following
from toque.fleet.rollout import Phase
from toque.fleet.spec import RolloutPolicy
from toque.fleet.store import DeploymentRow, Proposal, Revision

AUTO = RolloutPolicy(strategy="surge", follow="auto")
FAKE = [sys.executable, "-m", "toque.replica.fake"]


class Bot:
    """A registry of one model, whose only alias is `live`."""

    def __init__(self) -> None:
        self.live = 1

    async def resolve(self, reference: str) -> Revision:
        number = self.live if reference.endswith("@live") else int(reference.rpartition("/")[2])
        return Revision("", reference, f"/models/{number}", f"d{number}", f"bot/{number}")

    async def move(self, world: World, version: int) -> list[str]:
        self.live = version
        return await world.admin.propose("bot", "live", f"bot/{version}", f"d{version}", "ann")


async def following(model: str = "bot@live", **spec: RolloutPolicy) -> tuple[World, Bot]:
    bot = Bot()
    world = World(resolve=bot.resolve)
    await world.deploy(deployment(model=model, **spec))
    await world.run(2)
    return world, bot


async def proposed(world: World) -> Proposal | None:
    return (await world.admin.deployment("m")).proposed


async def test_a_rollout_is_proposed_and_begun_by_whoever_wants_it() -> None:
    world, bot = await following("models:/bot@live")
    assert await bot.move(world, 2) == ["m"]
    assert await proposed(world) == Proposal("models:/bot@live", "bot/2", "d2", "ann", world.placement.now)
    await world.run(5)
    assert (await world.admin.deployment("m")).version == "bot/1"  # nothing happens by itself
    await world.admin.start_rollout("m")
    assert await proposed(world) is None
    await world.run(5)
    assert (await world.admin.deployment("m")).version == "bot/2"


@pytest.mark.parametrize("model", ["bot/1", "bot@next", "shop@live", "/models/bot@live"])
async def test_who_follows_another_name_is_offered_nothing(model: str) -> None:
    async def pinned(reference: str) -> Revision:
        return Revision("", reference, "/models/1", "d1", "bot/1")

    world = World(resolve=pinned)
    await world.deploy(deployment(model=model))
    assert await world.admin.propose("bot", "live", "bot/2", "d2") == []
    assert await proposed(world) is None


async def test_an_alias_that_comes_back_or_goes_proposes_nothing_any_more() -> None:
    world, bot = await following()
    await bot.move(world, 2)
    assert await bot.move(world, 1) == []
    assert await proposed(world) is None
    await bot.move(world, 3)
    assert await world.admin.propose("bot", "live") == []
    assert await proposed(world) is None


async def test_what_is_proposed_stays_until_it_runs_or_another_model_is_deployed() -> None:
    world, bot = await following()
    await bot.move(world, 2)
    await world.admin.restart("m", {"max_sequences": 2})
    await world.run(5)
    assert await proposed(world) is not None
    await world.admin.deploy(deployment(model="bot/7"))
    assert await proposed(world) is None


async def test_a_move_during_a_rollout_is_proposed_beside_it() -> None:
    world, bot = await following()
    await bot.move(world, 2)
    await world.admin.start_rollout("m")
    assert await bot.move(world, 2) == []  # it is on its way
    assert await bot.move(world, 3) == ["m"]
    await world.run(5)
    view = await world.admin.deployment("m")
    assert (view.version, view.proposed and view.proposed.version) == ("bot/2", "bot/3")


async def test_a_rollout_that_returns_to_what_was_proposed_leaves_nothing_proposed() -> None:
    world, bot = await following()
    await bot.move(world, 2)
    await world.admin.start_rollout("m")
    await world.run(0.25)
    assert await bot.move(world, 1) == ["m"]  # something else than what is on its way
    await world.admin.undo("m")
    await world.run(5)
    assert (await world.admin.deployment("m")).version == "bot/1"
    assert await proposed(world) is None


async def test_one_deployment_that_vanishes_keeps_no_other_from_its_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, bot = await following()
    await world.deploy(deployment(name="z", model="bot@live"))
    edit = world.admin._edit

    async def gone(name: str, change: Edit) -> DeploymentRow:
        if name == "m":
            raise NotFoundError("there is no deployment m")
        return await edit(name, change)

    monkeypatch.setattr(world.admin, "_edit", gone)
    assert await bot.move(world, 2) == ["z"]


async def test_auto_begins_by_itself_and_after_a_running_rollout() -> None:
    world, bot = await following(rollout=AUTO)
    taker = Following(world.admin.start_rollout, world.placement.clock)
    versions = []
    await bot.move(world, 2)
    for second in range(20):
        taker.look(await world.store.deployments())
        await world.run(1)
        if second == 0:
            await bot.move(world, 3)
        if (view := await world.admin.deployment("m")).version not in versions:
            versions.append(view.version)
    assert versions == ["bot/1", "bot/2", "bot/3"]
    await taker.close()


async def test_a_version_that_led_back_is_not_begun_again() -> None:
    world, bot = await following(rollout=AUTO)
    taker = Following(world.admin.start_rollout, world.placement.clock)
    await bot.move(world, 2)
    taker.look(await world.store.deployments())
    await world.run(0.25)
    await world.admin.undo("m")
    for _ in range(40):
        taker.look(await world.store.deployments())
        await world.run(1)
    view = await world.admin.rollout("m")
    assert (view.phase, view.number) == (Phase.RETURNED, 1)


async def test_what_cannot_begin_is_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    world, bot = await following(rollout=AUTO)
    await bot.move(world, 2)
    now, tries = [0.0], 0

    async def start(name: str) -> None:
        nonlocal tries
        tries += 1
        raise DownloadError("no network")

    taker = Following(start, lambda: now[0])
    for _ in range(3):
        taker.look(await world.store.deployments())
        await asyncio.sleep(0)
    assert tries == 1
    assert "the rollout of bot/2 cannot begin: no network" in caplog.text
    now[0] += RETRY_S
    taker.look(await world.store.deployments())
    await asyncio.sleep(0)
    assert tries == 2


@pytest.mark.parametrize("kept", [False, True])
async def test_a_fleet_that_runs_follows(kept: bool, tmp_path: Path) -> None:
    bot = Bot()
    spec = deployment(model="bot@live", rollout=AUTO, memory_mb=1)
    fleet: AbstractAsyncContextManager[LocalFleet | DurableFleet]
    if kept:
        fleet = DurableFleet(
            f"sqlite:///{tmp_path}/registry.db",
            deployments=[spec],
            run_folder=tmp_path / "run",
            command=lambda revision: FAKE,
            log=lambda *_: None,
            resolve=bot.resolve,
        )
    else:
        pinned = await bot.resolve("bot@live")
        fleet = LocalFleet(
            [(spec, pinned)], command=lambda revision: FAKE, log=lambda *_: None, resolve=bot.resolve
        )
    async with fleet as running, asyncio.timeout(30):
        bot.live = 2
        assert await running.admin.propose("bot", "live", "bot/2", "d2") == ["m"]
        while True:
            view = await running.admin.deployment("m")
            if view.version == "bot/2" and view.status == "ready":
                break
            await asyncio.sleep(0.02)
        await running.admin.delete("m")
        while True:
            if not await running.admin.deployments():
                break
            await asyncio.sleep(0.02)
