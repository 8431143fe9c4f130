"""A deployment on this machine: replica processes, their supervisors, and the pool in front of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from toque.fleet.placement.base import PARENT_PID, ReplicaSpec
from toque.fleet.placement.local import LocalPlacement, Log, log_to_stderr
from toque.fleet.run_folder import RunFolder
from toque.fleet.supervisor import HangBounds, Health, Supervisor
from toque.routing.base import ReplicaEntry, RoutingTable
from toque.routing.pool import ReplicaPool

LEASE_S = 30.0


def replica_command(model: Path, engine: Mapping[str, object]) -> list[str]:
    """The command line of a replica, without what differs from one process to the next.

    ``engine`` holds EngineOptions by field name; None leaves the replica's own default.
    """
    argv = [sys.executable, "-m", "toque.replica", "--model", str(model)]
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    return argv


class LocalDeployment:
    """Keeps ``replicas`` processes of one command running between ``start`` and ``close`` (or in ``async with``).

    `pool` answers requests, says in which state the deployment is, and why. Whatever way this process ends, its
    replicas end with it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        replicas: int = 1,
        grace_s: float = 30.0,
        log: Log = log_to_stderr,
        bounds: HangBounds | None = None,
        on_change: Callable[[], None] | None = None,
        wait_s: float = 30.0,
        max_waiting: int = 256,
    ) -> None:
        """``command`` is `replica_command`'s; ``grace_s`` is what running requests get when it closes."""
        self.name = name
        self.pool = ReplicaPool(name, wait_s=wait_s, max_waiting=max_waiting, on_change=self._changed)
        self._on_change = on_change
        self._command = command
        self._replicas = replicas
        self._grace_s = grace_s
        self._placement = LocalPlacement(log)
        self._bounds = bounds
        self._folder: RunFolder | None = None
        self.supervisors: list[Supervisor] = []

    async def start(self) -> None:
        self._folder = RunFolder()
        for index in range(self._replicas):
            replica_id = f"{self.name}-{index}"
            self.supervisors.append(
                Supervisor(
                    replica_id,
                    self._placement,
                    self._spec_of(replica_id, index, self._folder.path),
                    self._health_of,
                    on_change=self._apply,
                    bounds=self._bounds,
                )
            )
        for supervisor in self.supervisors:
            supervisor.start()

    async def close(self, grace_s: float | None = None) -> None:
        """Running requests get the grace to finish; nothing is left behind."""
        grace = self._grace_s if grace_s is None else grace_s
        try:
            await asyncio.gather(*(supervisor.stop(grace) for supervisor in self.supervisors))
        finally:
            await self._placement.close(0.0)
            await self.pool.close()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises UnavailableError with the reason when it is not to be."""
        await self.pool.wait_ready(timeout_s)

    async def __aenter__(self) -> LocalDeployment:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(self._grace_s if error is None else 0.0)

    def _spec_of(self, replica_id: str, index: int, folder: Path) -> Callable[[int], ReplicaSpec]:
        def spec(epoch: int) -> ReplicaSpec:
            address = str(folder / f"{index}.{epoch}")
            argv = [*self._command, "--name", replica_id, "--socket", address]
            argv += [
                "--parent-pid",
                PARENT_PID,
                "--lease-s",
                f"{LEASE_S:g}",
                "--drain-s",
                f"{self._grace_s:g}",
            ]
            return ReplicaSpec(replica_id, epoch, argv, address, lease_s=LEASE_S)

        return spec

    def _apply(self) -> None:
        entries = tuple(s.entry for s in self.supervisors if s.entry.address)
        self.pool.apply(RoutingTable(self.name, entries))

    def _changed(self) -> None:
        for supervisor in self.supervisors:
            supervisor.stir()
        if self._on_change is not None:
            self._on_change()

    def _health_of(self, entry: ReplicaEntry) -> Health | None:
        session = self.pool.session(entry.replica_id, entry.epoch)
        return None if session is None else Health(session.state, session.silent_s)
