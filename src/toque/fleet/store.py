"""What the fleet remembers: deployments, their replicas, the lease of the one controller, what gateways reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from toque.fleet.rollout import Rollout
from toque.fleet.spec import DeploymentSpec
from toque.routing.base import DeploymentSignals, ReplicaState, RoutingTable, ServedVersion

EngineValues = dict[str, bool | int | float | str | None]


class Revision(Struct, frozen=True):
    """What a replica is started from: a pinned model version, with the engine options that it runs with.

    ``key`` names it in routing's tables. ``memory_mb`` is what one replica takes (an estimate until one has run).
    ``state`` is the `file_state` of a plain path when it was pinned: no replica is started from any other.
    """

    key: str
    reference: str  # as it was asked for
    path: str
    digest: str = ""
    label: str = ""
    engine: EngineValues = {}
    memory_mb: int = 0
    state: str = ""

    def served(self) -> ServedVersion:
        path = Path(self.path)
        label = self.label or self.digest or path.name
        return ServedVersion(self.key, path, self.digest, label, self.engine, self.state)


class Proposal(Struct, frozen=True):
    """The alias that a deployment follows (``reference``) points to another version (a label) now than the one that
    runs. ``by`` whom it was moved, and when (``at``: seconds since the epoch)."""

    reference: str
    version: str
    digest: str
    by: str = ""
    at: float = 0.0


class DeploymentRow(Struct, frozen=True):
    """A deployment as it shall be (`spec`, `generation`, `stopped`) and as far as the controller has come.

    ``stamp`` counts the writes of this row: who writes it says which one was read, and a row that was written
    meanwhile is a conflict. ``generation`` counts the changes of what shall be, and ``observed_generation`` is the
    last that the controller acted on.
    """

    name: str
    spec: DeploymentSpec
    revisions: tuple[Revision, ...]  # the current one, the one before, a rollout's, and what still runs
    current: str  # a revision's key
    previous: str = ""  # what `undo` returns to, "" if nothing
    generation: int = 1
    observed_generation: int = 0
    stopped: bool = False
    deleted: bool = False  # gone as soon as its replicas are
    target: int = 0  # replicas wanted
    reason: str = ""  # why so many
    rollout: Rollout | None = None  # the running one, or the last
    used_at: float = 0.0  # when a request was last there, seconds since the epoch; coarse
    stamp: int = 0
    proposed: Proposal | None = None

    def revision(self, key: str) -> Revision:
        return next(revision for revision in self.revisions if revision.key == key)


class ReplicaRow(Struct, frozen=True):
    """One replica, whichever process is it at the moment: each start is a new ``epoch``, higher than any before in
    this fleet (0: not started yet). Times: seconds since 1970, 0.0 where it has not come to that."""

    id: str
    deployment: str
    revision: str
    epoch: int = 0
    address: str = ""
    handle: str = ""
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    started_at: float = 0.0
    ready_at: float = 0.0
    retry_at: float = 0.0  # it has ended, and is not started again before
    restarts: int = 0
    memory_mb: int = 0
    gone: bool = False  # it shall end, and not be replaced


class Reported(Struct, frozen=True):
    """The last that one gateway said about one deployment, and when (seconds since the epoch)."""

    gateway_id: str
    at: float
    signals: DeploymentSignals


class Lease(Struct, frozen=True):
    """Who is the controller, until when (seconds since the epoch); ``epoch`` rises with each new holder."""

    holder: str
    epoch: int
    until: float


class Change(Struct, frozen=True):
    """What a controller writes at once: rows by their ids, ids of replicas that are gone, all routing tables."""

    deployments: tuple[DeploymentRow, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    removed: tuple[str, ...] = ()  # replica ids
    dropped: tuple[str, ...] = ()  # deployments that were deleted, their replicas gone
    tables: Mapping[str, RoutingTable] | None = None  # None: as before

    def __bool__(self) -> bool:
        return bool(self.deployments or self.replicas or self.removed or self.dropped) or (
            self.tables is not None
        )


class Committed(StrEnum):
    WRITTEN = "written"
    CONFLICT = "conflict"  # a deployment was written by somebody else meanwhile: nothing was changed
    FENCED = "fenced"  # the lease is another's: nothing was changed


class FleetStore(Protocol):
    """Everything raises StoreError when it is away, within seconds. Times are seconds since the epoch."""

    async def deployments(self) -> dict[str, DeploymentRow]: ...

    async def put(self, row: DeploymentRow) -> bool:
        """Writes the row if the stored one has the same ``stamp`` (0: if there is none), and raises the stamp.
        False if it does not: read it again."""
        ...

    async def replicas(self) -> list[ReplicaRow]: ...

    async def commit(self, lease: Lease, change: Change) -> Committed:
        """All of it or nothing."""
        ...

    async def tables(self, after: int) -> tuple[int, Mapping[str, RoutingTable]] | None:
        """All tables and their number, if that is another than ``after``."""
        ...

    async def report(self, reported: Sequence[Reported]) -> None: ...

    async def reported(self, since: float) -> list[Reported]: ...

    async def hold(self, holder: str, now: float, ttl_s: float) -> Lease | None:
        """Takes or renews the controller's lease until ``now + ttl_s``; None while it is somebody else's."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def close(self) -> None: ...


class MemoryFleetStore:
    """A fleet that lives in this process and ends with it. One controller, one event loop."""

    def __init__(self) -> None:
        self._deployments: dict[str, DeploymentRow] = {}
        self._replicas: dict[str, ReplicaRow] = {}
        self._reported: dict[tuple[str, str], Reported] = {}
        self._tables: Mapping[str, RoutingTable] = {}
        self._number = 0
        self._lease = Lease("", 0, 0.0)

    async def deployments(self) -> dict[str, DeploymentRow]:
        return dict(self._deployments)

    async def put(self, row: DeploymentRow) -> bool:
        if not self._matches(row):
            return False
        self._deployments[row.name] = msgspec.structs.replace(row, stamp=row.stamp + 1)
        return True

    async def replicas(self) -> list[ReplicaRow]:
        return list(self._replicas.values())

    async def commit(self, lease: Lease, change: Change) -> Committed:
        if lease.epoch != self._lease.epoch:
            return Committed.FENCED
        if not all(self._matches(row) for row in change.deployments):
            return Committed.CONFLICT
        for row in change.deployments:
            self._deployments[row.name] = msgspec.structs.replace(row, stamp=row.stamp + 1)
        for replica in change.replicas:
            self._replicas[replica.id] = replica
        for replica_id in change.removed:
            self._replicas.pop(replica_id, None)
        for name in change.dropped:
            self._deployments.pop(name, None)
        if change.tables is not None:
            self._tables, self._number = change.tables, self._number + 1
        return Committed.WRITTEN

    async def tables(self, after: int) -> tuple[int, Mapping[str, RoutingTable]] | None:
        return None if after == self._number else (self._number, self._tables)

    async def report(self, reported: Sequence[Reported]) -> None:
        for each in reported:
            self.hear(each)

    def hear(self, reported: Reported) -> None:
        self._reported[reported.gateway_id, reported.signals.deployment] = reported

    async def reported(self, since: float) -> list[Reported]:
        for key in [key for key, each in self._reported.items() if each.at < since]:
            del self._reported[key]
        return list(self._reported.values())

    async def hold(self, holder: str, now: float, ttl_s: float) -> Lease | None:
        held = self._lease
        if held.holder not in ("", holder) and held.until > now:
            return None
        epoch = held.epoch + (held.holder != holder)
        self._lease = Lease(holder, epoch, now + ttl_s)
        return self._lease

    async def release(self, lease: Lease) -> None:
        if self._lease.epoch == lease.epoch:
            self._lease = Lease("", lease.epoch, 0.0)

    async def close(self) -> None:
        pass

    def _matches(self, row: DeploymentRow) -> bool:
        stored = self._deployments.get(row.name)
        return row.stamp == (0 if stored is None else stored.stamp)
