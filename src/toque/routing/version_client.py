"""One version's part of a pool."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from toque.routing.base import OnRoute, ReplicaState
from toque.types import EngineRequest, EngineStats, SequenceOutput

if TYPE_CHECKING:
    from toque.routing.pool import ReplicaPool


class VersionClient:
    """The replicas of one version of a deployment. An EngineClient."""

    def __init__(self, pool: ReplicaPool, version: str) -> None:
        self._pool = pool
        self._version = version

    @property
    def state(self) -> ReplicaState:
        return self._pool.condition(self._version)[0]

    @property
    def reason(self) -> str:
        return self._pool.condition(self._version)[1]

    def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        return self._pool.generate(request, on_route, self._version)

    def stats(self) -> EngineStats:
        return self._pool.stats()
