"""The line of those who wait for a change: first come, first told, however long it takes."""

from __future__ import annotations

import asyncio
import time

import pytest

from toque.routing.line import WaitingLine


async def looks(line: WaitingLine, name: int, seen: list[int], times: int, until: float = 1e9) -> None:
    place = line.place()
    for _ in range(times):
        await line.changed(place, until)
        seen.append(name)


async def stand(line: WaitingLine, seen: list[int], times: int, count: int = 5) -> list[asyncio.Task[None]]:
    tasks = []
    for name in range(count):
        tasks.append(asyncio.create_task(looks(line, name, seen, times)))
        await asyncio.sleep(0)
    return tasks


async def test_a_change_is_told_in_the_order_of_arrival_however_often_some_have_looked() -> None:
    line, seen = WaitingLine(60.0), list[int]()
    tasks = await stand(line, seen, 2)
    late = asyncio.create_task(line.changed(line.place(), time.monotonic() + 0.01))
    await late  # one whose time is up
    for _ in range(2):
        line.wake()
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert seen == [0, 1, 2, 3, 4] * 2


async def test_one_that_returns_to_its_place_is_before_those_who_came_after_it() -> None:
    line, seen = WaitingLine(60.0), list[int]()
    first = line.place()
    tasks = await stand(line, seen, 1)

    async def comes_back() -> None:
        await line.changed(first, 1e9)
        seen.append(-1)

    tasks.append(asyncio.create_task(comes_back()))
    await asyncio.sleep(0)
    line.wake()
    await asyncio.gather(*tasks)
    assert seen == [-1, 0, 1, 2, 3, 4]


async def test_all_look_again_together_when_nothing_is_told() -> None:
    line, seen = WaitingLine(0.01), list[int]()
    await asyncio.gather(*await stand(line, seen, 3))
    assert seen == [0, 1, 2, 3, 4] * 3


async def test_a_wait_ends_at_its_own_time_and_a_cancelled_one_takes_nobodys_turn() -> None:
    line, seen = WaitingLine(60.0), list[int]()
    began = time.monotonic()
    await line.changed(line.place(), began + 0.02)
    assert time.monotonic() >= began + 0.02
    await line.changed(line.place(), began)  # it is over already
    tasks = await stand(line, seen, 1)
    tasks[1].cancel()
    line.wake()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    await asyncio.gather(*tasks[:1], *tasks[2:])
    assert seen == [0, 2, 3, 4]
