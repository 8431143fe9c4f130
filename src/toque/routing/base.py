"""What the gateway sees of the engines behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
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

    def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]: ...

    def stats(self) -> EngineStats: ...
