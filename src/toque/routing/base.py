"""What the gateway sees of the engines behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from toque.types import EngineRequest, EngineStats, SequenceOutput


class ReplicaState(StrEnum):
    STARTING = "starting"  # process up, weights loading
    READY = "ready"
    DEGRADED = "degraded"  # alive, but no step finished for too long while work exists
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"


class EngineClient(Protocol):
    """One replica, or a pool of them, as something that answers requests.

    ``generate`` yields at least one output; the last one carries ``finish_reason``. It raises UnavailableError when
    nothing was started, ContextLengthError or RequestError when the engine refuses the request, and ReplicaDiedError
    when the replica went away after the first output. Closing the iterator early (``aclose``) aborts the request:
    its KV blocks are free within a second.
    """

    @property
    def state(self) -> ReplicaState: ...

    @property
    def reason(self) -> str:
        """Why it is not ready, for people; "" when it is."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """One row of the table that routing gets from the fleet: a replica process and where it listens.

    ``replica_id`` and ``epoch`` name one process: a restarted replica has the same id and a higher epoch. ``state``
    and ``reason`` are what the fleet knows of the process; what the replica says of itself counts while it talks.
    """

    replica_id: str
    epoch: int
    address: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
