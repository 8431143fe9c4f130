"""Several replicas of one deployment as one EngineClient."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Protocol

from toque.errors import DeadlineError, QueueFullError, UnavailableError
from toque.routing.base import EngineClient, OnRoute, ReplicaEntry, ReplicaState, RouteEvent, RouteKind
from toque.routing.policies.least_load import Load, least_load
from toque.routing.session import ReplicaSession
from toque.types import EngineRequest, EngineStats, ModelCard, SequenceOutput

Key = tuple[str, int]  # replica id and epoch: one process
Policy = Callable[[Sequence[Load]], int]

_BEST_FIRST = (
    ReplicaState.READY,
    ReplicaState.DEGRADED,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.DEAD,
)
_RECHECK_S = 0.5  # silence makes a replica degraded without an event


class Session(EngineClient, Protocol):
    """What the pool needs of a ReplicaSession."""

    @property
    def in_flight(self) -> int: ...

    @property
    def silent_s(self) -> float: ...

    @property
    def card(self) -> ModelCard | None: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


def open_session(entry: ReplicaEntry, on_change: Callable[[], None]) -> Session:
    return ReplicaSession(f"{entry.replica_id}.{entry.epoch}", entry.address, on_change=on_change)


class ReplicaPool:
    """Sends each request to one of the replicas that `apply` last named. An EngineClient.

    A request is tried on another replica (or on the same one restarted) only while nothing of its answer has arrived,
    and after a replica has died under it at most ``max_deaths`` times: a request that kills replicas stops there.
    While no replica can take it, but one is coming up, a request waits at most ``wait_s``; at most ``max_waiting``
    requests wait, the next gets QueueFullError.
    """

    def __init__(
        self,
        name: str,
        *,
        policy: Policy = least_load,
        wait_s: float = 30.0,
        max_waiting: int = 256,
        max_deaths: int = 2,
        open_session: Callable[[ReplicaEntry, Callable[[], None]], Session] = open_session,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._policy = policy
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._max_deaths = max_deaths
        self._open_session = open_session
        self._on_change = on_change
        self._entries: dict[Key, ReplicaEntry] = {}
        self._sessions: dict[Key, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._waiting = 0
        self._changed = asyncio.Event()
        self._card: ModelCard | None = None

    def apply(self, entries: Sequence[ReplicaEntry]) -> None:
        """The fleet's table: sessions are opened for what is new in it and closed for what is gone or dead."""
        self._entries = {(entry.replica_id, entry.epoch): entry for entry in entries}
        for key in [key for key in self._sessions if not self._serves(key)]:
            task = asyncio.get_running_loop().create_task(self._sessions.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key, entry in self._entries.items():
            if key not in self._sessions and self._serves(key):
                self._sessions[key] = session = self._open_session(entry, self._notify)
                session.start()
        self._notify()

    async def close(self) -> None:
        """Ends every session; requests that wait fail with UnavailableError."""
        self._closed = True
        self.apply([])
        if self._closing:
            await asyncio.wait(self._closing)

    @property
    def state(self) -> ReplicaState:
        """The best state of any replica."""
        return self._best()[0]

    @property
    def reason(self) -> str:
        return self._best()[1]

    @property
    def card(self) -> ModelCard | None:
        """The model as the first replica that loaded it described it."""
        for session in self._sessions.values():
            self._card = self._card or session.card
        return self._card

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica to come up."""
        return self._waiting

    def session(self, replica_id: str, epoch: int) -> Session | None:
        return self._sessions.get((replica_id, epoch))

    def stats(self) -> EngineStats:
        """The sum over the replicas; ``waiting`` includes those that wait here."""
        every = [session.stats() for session in self._sessions.values()]
        sums = {f.name: sum(getattr(stats, f.name) for stats in every) for f in fields(EngineStats)}
        sums["waiting"] += self._waiting
        return EngineStats(**sums)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once a replica takes requests. Raises UnavailableError with the reason when none will."""
        until = time.monotonic() + timeout_s
        while self.state not in (ReplicaState.READY, ReplicaState.DEGRADED):
            if self.state is ReplicaState.DEAD or time.monotonic() >= until:
                raise UnavailableError(f"{self.name} is {self.state}: {self.reason}")
            await self._next_change(until)

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        tried: set[Key] = set()
        deaths = 0
        kind, reason = RouteKind.ROUTED, ""
        while True:
            key, session = await self._choose(request, tried, on_route)
            if on_route is not None:
                version = self._entries[key].version
                on_route(RouteEvent(kind, time.time(), *key, version=version, reason=reason))
            try:
                async with aclosing(session.generate(request)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except (UnavailableError, QueueFullError) as error:
                kind, reason = RouteKind.RETRIED, error.message
                # By contract nothing had started. Where it was refused by a replica that lives, it is not sent again.
                tried.add(key)
                deaths += session.state is ReplicaState.DEAD
                if deaths >= self._max_deaths or not self._hope(tried):
                    raise

    def _serves(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.state is not ReplicaState.DEAD

    def _condition(self, key: Key) -> tuple[ReplicaState, str]:
        entry = self._entries[key]
        session = self._sessions.get(key)
        if session is None or entry.state in (ReplicaState.DRAINING, ReplicaState.DEAD):
            return entry.state, entry.reason
        if session.state is ReplicaState.DEAD:  # the fleet will say what becomes of it
            return ReplicaState.STARTING, f"restarting: {session.reason}"
        if session.state is ReplicaState.STARTING:
            return ReplicaState.STARTING, entry.reason or session.reason
        return session.state, session.reason

    def _best(self) -> tuple[ReplicaState, str]:
        if not self._entries:
            return ReplicaState.STARTING, "no replica has been started"
        return min((self._condition(key) for key in self._entries), key=lambda c: _BEST_FIRST.index(c[0]))

    def _pick(self, tried: set[Key]) -> Key | None:
        for wanted in (ReplicaState.READY, ReplicaState.DEGRADED):
            keys = [k for k in self._sessions if k not in tried and self._condition(k)[0] is wanted]
            if keys:
                return keys[self._policy([_load(self._sessions[k]) for k in keys])]
        return None

    def _hope(self, tried: set[Key]) -> bool:
        """Whether a replica that has not refused this request takes requests or may come up."""
        for key in self._entries:
            state, _ = self._condition(key)
            if state is ReplicaState.STARTING:
                return True
            if state in (ReplicaState.READY, ReplicaState.DEGRADED) and key not in tried:
                return True
        return not self._entries and not self._closed

    async def _choose(
        self, request: EngineRequest, tried: set[Key], on_route: OnRoute | None
    ) -> tuple[Key, Session]:
        until = time.monotonic() + self._wait_s
        if (key := self._pick(tried)) is None and self._waiting >= self._max_waiting:
            raise QueueFullError(
                f"{self._waiting} requests wait for a replica of {self.name}, the most allowed"
            )
        if key is None and on_route is not None:
            on_route(RouteEvent(RouteKind.HELD, time.time(), reason=self.reason or self.state.value))
        self._waiting += 1
        try:
            while key is None:
                if not self._hope(tried) or time.monotonic() >= until:
                    raise UnavailableError(
                        f"no replica of {self.name} can answer: {self.reason or self.state.value}"
                    )
                if request.deadline is not None and time.time() >= request.deadline:
                    raise DeadlineError("the deadline passed before a replica could take the request")
                await self._next_change(until)
                key = self._pick(tried)
        finally:
            self._waiting -= 1
        return key, self._sessions[key]

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._on_change is not None:
            self._on_change()

    async def _next_change(self, until: float) -> None:
        changed = self._changed
        timeout = min(_RECHECK_S, max(0.0, until - time.monotonic()))
        # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await changed.wait()


def _load(session: Session) -> Load:
    stats = session.stats()
    return Load(
        in_flight=session.in_flight,
        requests=stats.running + stats.waiting,
        queued_tokens=stats.queued_tokens,
        kv_usage=stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
    )
