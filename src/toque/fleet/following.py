"""What becomes of deployments whose alias has moved: they are offered a rollout, and some take it by themselves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from toque.errors import ToqueError
from toque.fleet.store import DeploymentRow

RETRY_S = 30.0

_log = logging.getLogger("toque.fleet")


def due(row: DeploymentRow) -> bool:
    """Whether a proposed rollout is to be started without anybody's word."""
    if row.proposed is None or row.deleted or row.spec.rollout.follow != "auto":
        return False
    return row.rollout is None or not row.rollout.running


class Following:
    """Starts what is `due`, one at a time for each deployment; what cannot be started is tried again half a minute
    later."""

    def __init__(
        self, start: Callable[[str], Awaitable[object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``start`` begins a deployment's rollout to what its own reference means now."""
        self._start = start
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}

    def look(self, rows: Mapping[str, DeploymentRow]) -> None:
        """These are all deployments, as they are now."""
        for name, row in rows.items():
            if not due(row):
                self._not_before.pop(name, None)
            elif name not in self._tasks and self._clock() >= self._not_before.get(name, 0.0):
                self._not_before[name] = self._clock() + RETRY_S
                self._tasks[name] = asyncio.get_running_loop().create_task(self._begin(name, row))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _begin(self, name: str, row: DeploymentRow) -> None:
        assert row.proposed is not None
        try:
            await self._start(name)
            _log.info("%s: %s is %s now: a rollout begins", name, row.spec.model, row.proposed.version)
        except ToqueError as error:
            _log.warning("%s: the rollout of %s cannot begin: %s", name, row.proposed.version, error.message)
        finally:
            del self._tasks[name]
