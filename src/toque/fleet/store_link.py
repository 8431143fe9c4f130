"""The link of a gateway to a fleet that is kept in a store, wherever its controller runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from toque.errors import StoreError
from toque.fleet.link import OnTables
from toque.fleet.signals import FRESH_S
from toque.fleet.store import FleetStore, Reported
from toque.routing.base import DeploymentSignals, RoutingTable

POLL_S = 0.25
_REPEAT_S = FRESH_S / 2  # what has not changed is said again so often

_log = logging.getLogger("toque.fleet")


class StoreLink:
    """A FleetLink: tables are read four times a second, reports are written as they change. While the store is away
    the last tables stand, and the latest reports wait."""

    def __init__(
        self,
        store: FleetStore,
        *,
        on_urgent: Callable[[], None] = lambda: None,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_urgent`` is told when a report was written that the controller shall hear of at once."""
        self._store = store
        self._on_urgent = on_urgent
        self._poll_s = poll_s
        self._clock = clock
        self._subscribers: list[OnTables] = []
        self._tables: Mapping[str, RoutingTable] = {}
        self._number = -1
        self._pending: dict[tuple[str, str], Reported] = {}
        self._written: dict[tuple[str, str], Reported] = {}
        self._urgent = False
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="fleet link")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def publish(self, tables: Mapping[str, RoutingTable]) -> None:
        """Tables that a controller in this process has just written: no need to wait for the next look."""
        if tables != self._tables:
            self._tables = tables
            for on_tables in tuple(self._subscribers):
                on_tables(tables)

    def subscribe(self, on_tables: OnTables) -> Callable[[], None]:
        self._subscribers.append(on_tables)
        if self._tables:
            on_tables(self._tables)
        return lambda: self._subscribers.remove(on_tables)

    def report(self, gateway_id: str, signals: Sequence[DeploymentSignals]) -> None:
        now = self._clock()
        for each in signals:
            self._pending[gateway_id, each.deployment] = Reported(gateway_id, now, each)
            table = self._tables.get(each.deployment)
            if each.stranded or (each.waiting and table is not None and table.asleep):
                self._urgent = True
                self._stirred.set()

    async def look(self) -> None:
        """Writes what is to be said and reads what there is to know, once. Raises StoreError."""
        news = {key: each for key, each in self._pending.items() if self._is_news(key, each)}
        if news:
            await self._store.report(list(news.values()))
            self._written |= news
            for key, each in news.items():
                if self._pending.get(key) is each:
                    del self._pending[key]
        if self._urgent:
            self._urgent = False
            self._on_urgent()
        found = await self._store.tables(self._number)
        if found is not None:
            self._number, tables = found
            self.publish(tables)

    def _is_news(self, key: tuple[str, str], reported: Reported) -> bool:
        """Idle time goes by by itself, and is added to what was said."""
        before = self._written.get(key)
        if before is None or reported.at - before.at > _REPEAT_S:
            return True
        if not (reported.signals.waiting or reported.signals.running):
            idle = before.signals.idle_s + reported.at - before.at
            if abs(reported.signals.idle_s - idle) > 1.0:
                return True
        return _steady(before.signals) != _steady(reported.signals)

    async def _run(self) -> None:
        away = False
        while True:
            self._stirred.clear()
            try:
                await self.look()
                away = False
            except StoreError as error:
                if not away:
                    _log.warning("serving goes on with the last tables: %s", error.message)
                away = True
            # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._stirred.wait()


def _steady(signals: DeploymentSignals) -> DeploymentSignals:
    return replace(signals, idle_s=0.0, waiting_s=0.0)
