"""One after the other, however long each takes."""

from __future__ import annotations

from collections.abc import Sequence

from toque.routing.policies.base import Candidate, Key
from toque.types import EngineRequest


class RoundRobin:
    """Remembers who came last rather than a number, so that replicas may come and go between two turns."""

    def __init__(self) -> None:
        self._last: Key = ("", 0)

    def choose(self, request: EngineRequest, candidates: Sequence[Candidate]) -> int:
        keys = [candidate.key for candidate in candidates]
        after = min((key for key in keys if key > self._last), default=min(keys))
        self._last = after
        return keys.index(after)

    def forget(self, key: Key) -> None:
        pass
