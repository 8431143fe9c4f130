"""What placements tell of their processes, to whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from toque.fleet.placement.base import Event, EventKind


class Events:
    """Hands every event to every watcher; one that does not keep up misses some."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[Event]] = set()

    def tell(self, replica_id: str, epoch: int, kind: EventKind) -> None:
        for events in self._watchers:
            with contextlib.suppress(asyncio.QueueFull):
                events.put_nowait(Event(replica_id, epoch, kind))

    async def watch(self) -> AsyncGenerator[Event, None]:
        events: asyncio.Queue[Event] = asyncio.Queue(maxsize=256)
        self._watchers.add(events)
        try:
            while True:
                yield await events.get()
        finally:
            self._watchers.discard(events)
