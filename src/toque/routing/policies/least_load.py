"""The replica with the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from toque.routing.policies.base import Candidate, Key
from toque.types import EngineRequest


def least_loaded(candidates: Sequence[Candidate]) -> int:
    """The index of the least loaded one; the first of equals."""
    weights = [candidate.load.weight for candidate in candidates]
    return weights.index(min(weights))


class LeastLoad:
    def choose(self, request: EngineRequest, candidates: Sequence[Candidate]) -> int:
        return least_loaded(candidates)

    def forget(self, key: Key) -> None:
        pass
