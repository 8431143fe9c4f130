"""From zero and back with real processes, a gateway's pool, and requests that come all at once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fixtures.fleet import PooledFleet
from toque.fleet.spec import ScalingPolicy
from toque.routing.base import DeploymentSignals
from toque.types import EngineRequest, SamplingParams

FAKE = [sys.executable, "-m", "toque.replica.fake", "--step-s", "0.001"]


@asynccontextmanager
async def sleeping(idle_s: float) -> AsyncIterator[PooledFleet]:
    """A deployment that sleeps, and a gateway that reports as gateways do."""
    scaling = ScalingPolicy(min_replicas=0, max_replicas=3, downscale_to_zero_delay_s=idle_s)
    used_at = time.monotonic()

    def report() -> None:
        nonlocal used_at
        if running.pool.waiting or running.pool.running:
            used_at = time.monotonic()
        signals = DeploymentSignals(
            "m",
            waiting=running.pool.waiting,
            waiting_s=running.pool.waiting_s,
            running=running.pool.running,
            idle_s=time.monotonic() - used_at,
        )
        running.fleet.link.report("gateway", [signals])

    async def keep_reporting() -> None:
        while True:
            report()
            await asyncio.sleep(0.1)

    def report_soon() -> None:
        asyncio.get_running_loop().call_soon(report)

    running = PooledFleet(FAKE, scaling=scaling, on_wait=report_soon)
    async with running:
        reporting = asyncio.create_task(keep_reporting())
        try:
            yield running
        finally:
            reporting.cancel()


async def ask(running: PooledFleet, number: int) -> list[int]:
    request = EngineRequest(f"r{number}", (number,), SamplingParams(max_tokens=5))
    return [token async for output in running.pool.generate(request) for token in output.tokens]


async def until(condition: Callable[[], object], within_s: float) -> None:
    for _ in range(int(within_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"not within {within_s} s"


async def test_twenty_requests_at_once_start_one_replica_and_all_are_answered() -> None:
    async with sleeping(idle_s=60) as running:
        await until(lambda: running.pool.table.asleep, 20)
        answers = await asyncio.gather(*(ask(running, number) for number in range(1, 21)))
        assert answers == [[number] * 5 for number in range(1, 21)]
        (replica,) = await running.fleet.admin.replicas()
        assert replica.epoch == 1  # the first process of all


async def test_requests_at_the_moment_of_falling_asleep_are_answered() -> None:
    """Asked again and again around the instant at which the idle timer runs out."""
    async with sleeping(idle_s=0.3) as running:
        starts = set()
        for number in range(1, 13):
            assert await ask(running, number) == [number] * 5
            starts.add(max(entry.epoch for entry in running.pool.table.entries))
            await asyncio.sleep(0.3 + 0.04 * (number % 6))
        await until(lambda: running.pool.table.asleep and not running.pool.table.entries, 20)
        assert len(starts) > 1  # it did fall asleep in between
