"""The two links of a gateway to its fleet, without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from toque.errors import StoreError
from toque.fleet.link import DirectLink
from toque.fleet.store import Change, MemoryFleetStore, Reported
from toque.fleet.store_link import StoreLink
from toque.routing.base import DeploymentSignals, RoutingTable

ASLEEP = {"m": RoutingTable("m", asleep=True)}
AWAKE = {"m": RoutingTable("m")}


class Store(MemoryFleetStore):
    """One that may be away, and remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.written: list[DeploymentSignals] = []

    async def report(self, reported: Sequence[Reported]) -> None:
        if self.away:
            raise StoreError("the database is away")
        self.written += [each.signals for each in reported]
        await super().report(reported)

    async def tables(self, after: int) -> tuple[int, Mapping[str, RoutingTable]] | None:
        if self.away:
            raise StoreError("the database is away")
        return await super().tables(after)

    async def publish(self, tables: Mapping[str, RoutingTable]) -> None:
        lease = await self.hold("one", 0.0, 1e9)
        assert lease is not None
        await self.commit(lease, Change(tables=tables))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_subscriber_gets_what_is_known_and_every_change_until_it_ends() -> None:
    link = DirectLink(MemoryFleetStore(), lambda: None)
    link.publish(ASLEEP)
    seen: list[Mapping[str, RoutingTable]] = []
    end = link.subscribe(seen.append)
    link.publish(AWAKE)
    end()
    link.publish(ASLEEP)
    assert seen == [ASLEEP, AWAKE]


async def test_only_what_waits_for_a_sleeper_is_urgent() -> None:
    urgent: list[int] = []
    store = MemoryFleetStore()
    link = DirectLink(store, lambda: urgent.append(1), Clock())
    link.publish({**ASLEEP, "awake": RoutingTable("awake")})
    link.report("g", [DeploymentSignals("awake", waiting=5), DeploymentSignals("m", running=1)])
    assert not urgent
    link.report("g", [DeploymentSignals("m", waiting=1)])
    assert urgent == [1]
    assert {each.signals.deployment: each.signals.waiting for each in await store.reported(0.0)} == {
        "awake": 5,
        "m": 1,
    }


async def test_tables_come_through_the_store_once_each() -> None:
    store = Store()
    link = StoreLink(store)
    seen: list[Mapping[str, RoutingTable]] = []
    link.subscribe(seen.append)
    await link.look()
    await store.publish(ASLEEP)
    await link.look()
    await link.look()
    link.publish(AWAKE)  # by a controller in this process, which has written it too
    await store.publish(AWAKE)
    await link.look()
    assert seen == [ASLEEP, AWAKE]


async def test_reports_are_written_when_they_say_something_new() -> None:
    store, clock = Store(), Clock()
    link = StoreLink(store, clock=clock)
    idle = 50.0
    for _ in range(8):  # nothing but time goes by: said again after half of what keeps it fresh
        link.report("g", [DeploymentSignals("m", idle_s=idle)])
        await link.look()
        clock.now += 0.5
        idle += 0.5
    assert len(store.written) == 2
    link.report("g", [DeploymentSignals("m", running=1)])
    await link.look()
    link.report("g", [DeploymentSignals("m", idle_s=0.1)])
    await link.look()
    link.report("g", [DeploymentSignals("m", idle_s=0.2)])
    await link.look()
    assert [(each.running, each.idle_s) for each in store.written[2:]] == [(1, 0.0), (0, 0.1)]
    clock.now += 0.5
    link.report("g", [DeploymentSignals("m", idle_s=30.0)])  # not what the time that went by makes of it
    await link.look()
    assert store.written[-1].idle_s == 30.0


async def test_while_the_store_is_away_the_last_tables_stand_and_the_latest_report_waits() -> None:
    store, urgent = Store(), []
    link = StoreLink(store, on_urgent=lambda: urgent.append(1))
    seen: list[Mapping[str, RoutingTable]] = []
    link.subscribe(seen.append)
    await store.publish(ASLEEP)
    await link.look()
    store.away = True
    for waiting in (1, 2, 3):
        link.report("g", [DeploymentSignals("m", waiting=waiting)])
        with pytest.raises(StoreError):
            await link.look()
    assert seen == [ASLEEP]
    store.away = False
    await link.look()
    assert [each.waiting for each in store.written] == [3]
    assert urgent == [1]
