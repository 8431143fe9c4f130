"""Rollouts of real processes under constant requests: none fails, none is cut, none is altered."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from fixtures.fleet import PooledFleet
from toque.fleet.spec import RolloutPolicy
from toque.fleet.views import ReplicaView
from toque.routing.base import DeploymentSignals
from toque.types import EngineRequest, SamplingParams

FAKE = [sys.executable, "-m", "toque.replica.fake", "--step-s", "0.005"]


class Traffic:
    """Requests of all lengths, one after another, on several lines at once; every answer is checked."""

    def __init__(self, running: PooledFleet) -> None:
        self.answered = 0
        self._running = running

    async def line(self, number: int) -> None:
        for turn in range(10**6):
            length = 1 + (number * 7 + turn * 13) % 40
            prompt = (number + 1, turn + 1)
            request = EngineRequest(f"r{number}.{turn}", prompt, SamplingParams(max_tokens=length))
            tokens: list[int] = []
            async for output in self._running.pool.generate(request):
                tokens += output.tokens
            assert tokens == (list(prompt) * length)[:length]
            self.answered += 1


@asynccontextmanager
async def traffic(running: PooledFleet, lines: int = 4) -> AsyncIterator[Traffic]:
    flowing = Traffic(running)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(flowing.line(number)) for number in range(lines)]
        yield flowing
        for task in tasks:
            task.cancel()


async def done(running: PooledFleet, phase: str) -> None:
    for _ in range(1000):
        view = await running.fleet.admin.rollout("m")
        if not view.running:
            break
        await asyncio.sleep(0.02)
    assert view.phase == phase, view.reason


@pytest.mark.parametrize("updates", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_updates_in_a_row_lose_nothing(updates: int) -> None:
    async with PooledFleet(FAKE, rollout=RolloutPolicy(strategy="surge")) as running:
        await running.wait_ready(20)
        async with traffic(running) as flowing:
            for number in range(updates):
                await running.fleet.admin.start_rollout("m", f"/v{number}")
                await done(running, "done")
        assert flowing.answered > updates
        (view,) = await running.fleet.admin.replicas()
        assert view.version == f"/v{updates - 1}"


async def test_a_swap_in_place_never_has_two_processes_and_loses_nothing() -> None:
    async with PooledFleet(FAKE, rollout=RolloutPolicy(strategy="swap")) as running:
        await running.wait_ready(20)
        most = 0
        async with traffic(running) as flowing:
            for number in range(3):
                await running.fleet.admin.start_rollout("m", f"/v{number}")
                async with asyncio.timeout(60):
                    while (await running.fleet.admin.rollout("m")).running:
                        most = max(most, len(running.pool.table.entries))
                        await asyncio.sleep(0.02)
        assert most == 1
        assert flowing.answered > 3


async def some_ready(running: PooledFleet) -> list[ReplicaView]:
    """Those that are ready: perhaps not at once, where one was killed last and another is leaving."""
    for _ in range(1000):
        if ready := [view for view in await running.fleet.admin.replicas() if view.state == "ready"]:
            return ready
        await asyncio.sleep(0.01)
    raise AssertionError("no replica becomes ready")


@pytest.mark.parametrize("strategy", ["surge", "swap"])
async def test_streams_whose_replica_is_killed_while_it_leaves_are_finished_by_another(
    strategy: Literal["surge", "swap"],
) -> None:
    """Its version's last one, while the new version has all new requests."""
    fleet: PooledFleet

    def report() -> None:  # as a gateway does
        pool = fleet.pool
        signals = DeploymentSignals("m", waiting=pool.waiting, running=pool.running, stranded=pool.stranded)
        fleet.fleet.link.report("gateway", [signals])

    async with PooledFleet(
        FAKE, rollout=RolloutPolicy(strategy=strategy), on_wait=report, grace_s=10.0
    ) as fleet:
        await fleet.wait_ready(20)
        requests = [EngineRequest(f"r{n}", (n + 1, 7), SamplingParams(max_tokens=300)) for n in range(4)]
        answers = [asyncio.create_task(tokens_of(fleet, request)) for request in requests]
        while fleet.pool.running < len(requests):
            await fleet.pool.changed(time.monotonic() + 0.01)
        await fleet.fleet.admin.start_rollout("m", "/v2")
        async with asyncio.timeout(60):
            while True:
                views = await fleet.fleet.admin.replicas()
                if leaving := [view for view in views if view.state == "draining"]:
                    break
                await asyncio.sleep(0.01)
        os.kill(int(leaving[0].handle), signal.SIGKILL)
        async with asyncio.timeout(60):
            while not all(answer.done() for answer in answers):
                report()
                await asyncio.sleep(0.05)
        for request, answer in zip(requests, answers, strict=True):
            assert answer.result() == list(request.prompt) * 150
        await done(fleet, "done")


async def tokens_of(running: PooledFleet, request: EngineRequest) -> list[int]:
    (version,) = running.pool.table.shares
    return [token async for output in running.pool.of(version).generate(request) for token in output.tokens]


async def test_replicas_that_are_killed_in_the_middle_of_an_update_change_nothing() -> None:
    policy = RolloutPolicy(strategy="surge")
    async with PooledFleet(FAKE, replicas=2, rollout=policy) as running:
        await running.wait_ready(20)
        async with traffic(running):
            for number in range(4):
                await running.fleet.admin.start_rollout("m", f"/v{number}")
                await asyncio.sleep(0.1 * number)
                ready = await some_ready(running)
                os.kill(int(ready[number % len(ready)].handle), signal.SIGKILL)
                await done(running, "done")
        assert {view.version for view in await running.fleet.admin.replicas()} == {"/v3"}
