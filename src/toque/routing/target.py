"""One replica process as the pool sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from toque.routing.base import EngineClient, ReplicaEntry, ReplicaState
from toque.routing.breaker import Breaker
from toque.routing.policies.base import Key, Load
from toque.routing.session import ReplicaSession
from toque.types import EngineStats, ModelCard


class Session(EngineClient, Protocol):
    """What the pool needs of a ReplicaSession."""

    on_stats: Callable[[EngineStats], None] | None

    @property
    def silent_s(self) -> float: ...

    @property
    def card(self) -> ModelCard | None: ...

    def start(self) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def close(self) -> None: ...


OpenSession = Callable[[ReplicaEntry, Callable[[], None]], Session]


def open_session(entry: ReplicaEntry, on_change: Callable[[], None]) -> Session:
    return ReplicaSession(f"{entry.replica_id}.{entry.epoch}", entry.address, on_change=on_change)


class Target:
    """A session, and what is known of the replica at its other end. ``entry`` is the fleet's word on it."""

    __slots__ = ("breaker", "entry", "key", "load", "session", "silent", "silent_s")

    def __init__(self, entry: ReplicaEntry, session: Session) -> None:
        self.key: Key = (entry.replica_id, entry.epoch)
        self.entry = entry
        self.session = session
        self.load = Load()
        self.breaker = Breaker()
        self.silent = False  # nothing heard for so long that requests had better go elsewhere
        self.silent_s = 0.0
        session.on_stats = self.load.report

    def condition(self) -> tuple[ReplicaState, str]:
        """The state and its reason: the fleet's word where it has decided, else the replica's own."""
        entry, session = self.entry, self.session
        if entry.state in (ReplicaState.DRAINING, ReplicaState.DEAD):
            return entry.state, entry.reason
        state = session.state
        if state is ReplicaState.DEAD:  # the fleet will say what becomes of it
            return ReplicaState.STARTING, f"restarting: {session.reason}"
        if state is ReplicaState.STARTING:
            return ReplicaState.STARTING, entry.reason or session.reason
        return state, session.reason


class Attempt:
    """A request at a target, from when it is sent there until `end`; ``told``: the breaker knows how it went."""

    __slots__ = ("_over", "target", "told")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.told = False
        self._over = False
        target.breaker.sent()
        target.load.sent()

    def end(self) -> None:
        """May be called more than once."""
        if not self._over:
            self._over = True
            self.target.load.ended()
            if not self.told:
                self.target.breaker.left()
