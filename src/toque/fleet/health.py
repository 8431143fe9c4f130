"""What the fleet sees of a replica from outside, and when that means that it has to be replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from toque.routing.base import ReplicaEntry, ReplicaState
from toque.routing.session import ReplicaSession
from toque.types import EngineStats

POLL_S = 0.25


class Health(Struct, frozen=True):
    """A replica's state as it says itself, for how long it has said nothing, and its last report. ``loaded``: it has
    been ready, if only for a moment that nobody looked at."""

    state: ReplicaState
    silent_s: float = 0.0
    reason: str = ""
    stats: EngineStats = EngineStats()
    loaded: bool = False


class HealthSource(Protocol):
    """Whoever hears the replicas."""

    def follow(self, entries: Iterable[ReplicaEntry]) -> None:
        """These are all that there are: the others need not be heard any more."""
        ...

    def health(self, replica_id: str, epoch: int) -> Health | None:
        """None for one that is not followed."""
        ...

    async def close(self) -> None: ...


class SessionHealth:
    """Hears each replica through a session of its own, which also keeps the replica's lease."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._sessions: dict[tuple[str, int], ReplicaSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, entries: Iterable[ReplicaEntry]) -> None:
        wanted = {(entry.replica_id, entry.epoch): entry for entry in entries}
        for key in [key for key in self._sessions if key not in wanted]:
            task = asyncio.get_running_loop().create_task(self._sessions.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key, entry in wanted.items():
            if key not in self._sessions:
                session = ReplicaSession(
                    f"{entry.replica_id}.{entry.epoch}",
                    entry.address,
                    client="controller",
                    on_change=self._on_change,
                )
                self._sessions[key] = session
                session.start()

    def health(self, replica_id: str, epoch: int) -> Health | None:
        session = self._sessions.get((replica_id, epoch))
        if session is None:
            return None
        loaded = session.card is not None
        return Health(session.state, session.silent_s, session.reason, session.stats(), loaded)

    async def close(self) -> None:
        self.follow(())
        if self._closing:
            await asyncio.wait(self._closing)


class HangBounds(Struct, frozen=True):
    """A replica is replaced when it has said nothing for ``silent_s`` (it talks twice a second), when it has been
    degraded (no step finishes) for ``degraded_s``, or when it lives on without its session for ``lost_s``."""

    silent_s: float = 5.0
    degraded_s: float = 60.0
    lost_s: float = 2.0


class Life:
    """What has been seen of one process. Times are monotonic seconds, given by the caller."""

    def __init__(self, bounds: HangBounds) -> None:
        self._bounds = bounds
        self._ready_since: float | None = None
        self._since: dict[ReplicaState, float] = {}  # of the state it is in now
        self._looked: float | None = None
        self._awake_since = 0.0

    def ready_s(self) -> float | None:
        """How long ago it was first ready; None if it never was."""
        return None if self._ready_since is None or self._looked is None else self._looked - self._ready_since

    def judge(self, now: float, health: Health | None, *, loaded: bool = False) -> str:
        """Why this process has to be replaced; "" if it has not. ``loaded``: it has been ready, whoever knows."""
        if self._looked is None or now - self._looked > 10 * POLL_S:
            # We did not run ourselves for a while (stopped, starved): what it said meanwhile is yet to be read.
            self._awake_since = now
        self._looked = now
        if health is not None:
            loaded = loaded or health.loaded or health.state is ReplicaState.READY
        if self._ready_since is None and loaded:
            self._ready_since = now  # or a moment before: a request may have ended it since
        if health is None:
            return ""
        if health.state not in self._since:
            self._since = {health.state: now}
        lasted = now - max(self._since[health.state], self._awake_since)
        silent = min(health.silent_s, now - self._awake_since)
        if silent > self._bounds.silent_s:
            return f"it hung: nothing heard for {silent:.0f} s"
        if health.state is ReplicaState.DEGRADED and lasted > self._bounds.degraded_s:
            return f"it hung: no step finished for {lasted:.0f} s"
        if health.state is ReplicaState.DEAD and lasted > self._bounds.lost_s:
            return "its session was lost"
        return ""
