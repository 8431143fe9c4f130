"""What a routing policy decides from, and how it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from toque.types import EngineRequest, EngineStats

Key = tuple[str, int]  # replica id and epoch: one process


class Load:
    """How much one replica has to do.

    ``in_flight`` is what this process has sent and not seen end: exact and current. The rest is the replica's last
    report, up to half a second old, and counts what other gateways sent it too. ``weight`` orders replicas, the least
    loaded first; it is kept, not computed when asked, because a decision looks at all of them.
    """

    __slots__ = ("in_flight", "kv_usage", "queued_tokens", "requests", "weight")

    def __init__(
        self, in_flight: int = 0, requests: int = 0, queued_tokens: int = 0, kv_usage: float = 0.0
    ) -> None:
        """``requests``: running and waiting there. ``kv_usage``: 0 to 1."""
        self.in_flight = in_flight
        self.requests = requests
        self.queued_tokens = queued_tokens
        self.kv_usage = kv_usage
        self.weight: tuple[int, int, float] = (0, 0, 0.0)
        self._weigh()

    def report(self, stats: EngineStats) -> None:
        self.requests = stats.running + stats.waiting
        self.queued_tokens = stats.queued_tokens
        self.kv_usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        self._weigh()

    def sent(self) -> None:
        self.in_flight += 1
        self._weigh()

    def ended(self) -> None:
        self.in_flight -= 1
        self._weigh()

    def _weigh(self) -> None:
        self.weight = (max(self.in_flight, self.requests), self.queued_tokens, self.kv_usage)


class Candidate(Protocol):
    @property
    def key(self) -> Key: ...

    @property
    def load(self) -> Load: ...


class Policy(Protocol):
    """Which replica gets a request. Everything here is in memory, and done in microseconds."""

    def choose(self, request: EngineRequest, candidates: Sequence[Candidate]) -> int:
        """The index of one of the candidates, of which there is at least one. The request is sent there.

        A list that is given again holds the same candidates in the same order: it is replaced, never changed."""
        ...

    def forget(self, key: Key) -> None:
        """This process is gone."""
        ...
