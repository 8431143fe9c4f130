"""Where replica processes run. Placement starts and stops them; it never carries requests, and decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

PARENT_PID = "{parent-pid}"  # an argv element that becomes the pid of the process that starts the replica


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. Sizes are what is free now; ``total_bytes`` is all that replicas may ever use (0: unknown)."""

    name: str
    cpus: float
    memory_bytes: int
    total_bytes: int = 0
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica process as it should be. ``(replica_id, epoch)`` names it for ever: a restart is a new epoch.

    ``environment`` is added to the starter's own. ``lease_s`` is how long the process may live without a session.
    """

    replica_id: str
    epoch: int
    argv: Sequence[str]
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    gang_size: int = 1
    model_digest: str = ""
    token: str = field(default="", repr=False)
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Observed:
    """One replica process as it is. ``exit_status`` is negative for a signal, and None while it lives."""

    replica_id: str
    epoch: int
    address: str
    handle: str  # the placement's own name for it: a pid, an actor id
    exit_status: int | None = None
    last_error: str = ""  # what it said last, once it has ended badly
    loaded: bool = False  # it has been ready, even if nobody heard it say so


def loaded_mark(address: str) -> str:
    """The file that a replica at ``address`` makes once it is loaded, before anybody can send it a request.

    A request may end the process before its controller has heard that it was ready; the file stays until the
    placement has stopped it.
    """
    return f"{address}.loaded"


class EventKind(StrEnum):
    STARTED = "started"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class Event:
    replica_id: str
    epoch: int
    kind: EventKind


class Placement(Protocol):
    """Guarantees: after `ensure` returns the process exists or is listed as exited; after `stop` returns it is gone
    and no longer listed. Ended processes stay listed until they are stopped or a newer epoch replaces them."""

    async def capacity(self) -> list[Node]: ...

    async def ensure(self, spec: ReplicaSpec) -> None:
        """Idempotent on ``(replica_id, epoch)``. A newer epoch ends an older one first; an older one raises
        EngineError."""

    async def stop(self, replica_id: str, epoch: int, grace_s: float) -> int | None:
        """Ends it: politely, then, after the grace, for good. Unknown ones, and other epochs, are left alone.

        Returns how it ended, as `Observed` says it: 0 if it finished what it had."""

    async def list(self) -> list[Observed]:
        """The truth; what a restarted controller adopts."""

    def watch(self) -> AsyncIterator[Event]:
        """A lossy hint of when to look at `list` again; never the truth."""
