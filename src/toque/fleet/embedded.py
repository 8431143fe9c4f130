"""The fleet of one server: it lives in memory, runs on this machine, and ends with this process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from toque.fleet.admin import FleetAdmin, Resolve
from toque.fleet.controller import Controller
from toque.fleet.following import Following
from toque.fleet.health import HangBounds, SessionHealth
from toque.fleet.launch import Command, Launch, command_of
from toque.fleet.link import DirectLink
from toque.fleet.placement.local import LocalPlacement, Log, log_to_stderr
from toque.fleet.resolve import resolve as resolve_reference
from toque.fleet.revisions import first_row
from toque.fleet.run_folder import RunFolder
from toque.fleet.spec import DeploymentSpec
from toque.fleet.store import MemoryFleetStore, Revision

POLL_S = 0.5  # everything that is urgent comes as an event here


class LocalFleet:
    """Runs deployments as processes of this machine between ``start`` and ``close`` (or in ``async with``).

    `link` is what a gateway in the same event loop needs, `admin` what people do. Whatever way this process ends, its
    replicas end with it.
    """

    def __init__(
        self,
        deployments: Sequence[tuple[DeploymentSpec, Revision]] = (),
        *,
        memory_mb: int = 0,
        grace_s: float = 1.0,
        log: Log = log_to_stderr,
        bounds: HangBounds | None = None,
        command: Command = command_of,
        resolve: Resolve = resolve_reference,
    ) -> None:
        """``deployments`` with their pinned versions, as `resolve` gives them; ``memory_mb``: what all replicas may
        take, 0 is nine tenths of what there is; ``grace_s``: what requests get that still run when it closes."""
        self._deployments = deployments
        self._memory_mb = memory_mb
        self._grace_s = grace_s
        self._bounds = bounds
        self._command = command
        self._placement = LocalPlacement(log)
        self._store = MemoryFleetStore()
        self._stack = AsyncExitStack()
        self.controller: Controller | None = None
        self.link = DirectLink(self._store, self._stir)
        self.admin = FleetAdmin(self._store, resolve, self._stir)
        self._following = Following(self.admin.start_rollout)

    async def start(self) -> None:
        """Returns when the first replica processes have been started. RequestError for what cannot be deployed."""
        for spec, pinned in self._deployments:
            await self._store.put(first_row(spec, pinned, time.time()))
        folder = RunFolder()
        self._stack.callback(folder.close)
        self.controller = controller = Controller(
            self._store,
            self._placement,
            SessionHealth(self._stir),
            Launch(folder.path, command=self._command),
            holder=str(os.getpid()),
            memory_mb=self._memory_mb,
            bounds=self._bounds,
            on_tables=self.link.publish,
            on_rows=self._following.look,
            poll_s=POLL_S,
        )
        self._stack.push_async_callback(self._placement.close, 0.0)
        self._stack.push_async_callback(self._end, controller)
        await controller.round()
        controller.start()

    async def close(self, grace_s: float | None = None) -> None:
        """Running requests get the grace to finish; nothing is left behind."""
        if grace_s is not None:
            self._grace_s = grace_s
        await self._stack.aclose()

    async def __aenter__(self) -> LocalFleet:
        try:
            await self.start()
        except BaseException:
            await self.close(0.0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(None if error is None else 0.0)

    async def _end(self, controller: Controller) -> None:
        await controller.close()
        await self._following.close()
        await controller.stop_replicas(self._grace_s)
        self.link.publish({})

    def _stir(self) -> None:
        if self.controller is not None:
            self.controller.stir()
