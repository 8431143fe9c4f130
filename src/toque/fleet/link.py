"""What a gateway and the fleet tell each other, whichever processes they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from toque.fleet.store import MemoryFleetStore, Reported
from toque.routing.base import DeploymentSignals, RoutingTable

OnTables = Callable[[Mapping[str, RoutingTable]], None]


class FleetLink(Protocol):
    """Neither call blocks, and both are made from the gateway's event loop, as are the calls of ``on_tables``."""

    def subscribe(self, on_tables: OnTables) -> Callable[[], None]:
        """``on_tables`` is called with the tables of all deployments: at once if any are known, then whenever one
        changed. A deployment that is not among them is gone. Returns what ends the subscription."""
        ...

    def report(self, gateway_id: str, signals: Sequence[DeploymentSignals]) -> None:
        """The deployments that changed, or all of them: twice a second, and at once when a request waits for one
        that is asleep, or has lost its replica. ``gateway_id`` names this gateway's process: a restarted one has
        another."""
        ...


class DirectLink:
    """The link to a controller in the same event loop."""

    def __init__(
        self,
        store: MemoryFleetStore,
        on_report: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_report``: something waits that nobody serves; the controller looks at once."""
        self._store = store
        self._on_report = on_report
        self._clock = clock
        self._subscribers: list[OnTables] = []
        self._tables: Mapping[str, RoutingTable] = {}

    def publish(self, tables: Mapping[str, RoutingTable]) -> None:
        self._tables = tables
        for on_tables in tuple(self._subscribers):
            on_tables(tables)

    def subscribe(self, on_tables: OnTables) -> Callable[[], None]:
        self._subscribers.append(on_tables)
        if self._tables:
            asyncio.get_running_loop()  # a caller outside the loop is a mistake that would show up late
            on_tables(self._tables)
        return lambda: self._subscribers.remove(on_tables)

    def report(self, gateway_id: str, signals: Sequence[DeploymentSignals]) -> None:
        now = self._clock()
        for each in signals:
            self._store.hear(Reported(gateway_id, now, each))
            table = self._tables.get(each.deployment)
            if each.stranded or (each.waiting and (table is None or table.asleep)):
                self._on_report()
