"""A fleet that is kept in the registry's database: it outlives the servers, and several of them share it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from toque.errors import ConflictError
from toque.fleet.admin import FleetAdmin, Resolve
from toque.fleet.controller import LEASE_TTL_S, Controller
from toque.fleet.following import Following
from toque.fleet.health import HangBounds, SessionHealth
from toque.fleet.launch import LEASE_S, Command, Launch, command_of
from toque.fleet.placement.detached import DetachedPlacement
from toque.fleet.placement.local import Log, log_to_stderr
from toque.fleet.resolve import resolve as resolve_reference
from toque.fleet.run_folder import private_base
from toque.fleet.spec import DeploymentSpec
from toque.fleet.store_link import StoreLink

_log = logging.getLogger("toque.fleet")


class DurableFleet:
    """This server's part in the fleet of the database at ``url``, between ``start`` and ``close``.

    `link` and `admin` work in every server. One of those that ``control`` leads at a time; when it is gone another
    one takes over within 10 s, and adopts the replicas that run. They run on this machine, as processes that no
    server's end disturbs: without any session, of a gateway's or a controller's, they end by themselves after
    ``lease_s``.
    """

    def __init__(
        self,
        url: str,
        *,
        control: bool = True,
        deployments: Sequence[DeploymentSpec] = (),
        memory_mb: int = 0,
        lease_s: float = LEASE_S,
        lease_ttl_s: float = LEASE_TTL_S,
        run_folder: Path | None = None,
        log: Log = log_to_stderr,
        bounds: HangBounds | None = None,
        command: Command = command_of,
        resolve: Resolve = resolve_reference,
    ) -> None:
        """``deployments`` are deployed as it starts; those that the database has besides stay. ``run_folder``: where
        sockets, logs and records of processes are; the default depends on ``url`` alone, so that every server on
        this machine finds them. ``lease_ttl_s``: after so long without its sign of life the leader is replaced."""
        self._url = url
        self._control = control
        self._deployments = deployments
        self._memory_mb = memory_mb
        self._lease_s = lease_s
        self._lease_ttl_s = lease_ttl_s
        self._run_folder = run_folder
        self._log = log
        self._bounds = bounds
        self._command = command
        self._resolve = resolve
        self._stack = AsyncExitStack()
        self.controller: Controller | None = None
        self.link: StoreLink
        self.admin: FleetAdmin

    async def start(self) -> None:
        """Raises StoreError while the database is away, and what `FleetAdmin.deploy` does."""
        from toque.fleet.sql_store import SqlFleetStore

        store = await asyncio.to_thread(SqlFleetStore, self._url)
        self._stack.push_async_callback(store.close)
        self.link = StoreLink(store, on_urgent=self._stir)
        self.admin = FleetAdmin(store, self._resolve, self._stir)
        if self._control:
            folder = self._run_folder or default_run_folder(self._url)
            placement = DetachedPlacement(folder, self._log)
            following = Following(self.admin.start_rollout)
            self._stack.push_async_callback(following.close)
            self.controller = Controller(
                store,
                placement,
                SessionHealth(self._stir),
                Launch(folder, bound=False, lease_s=self._lease_s, command=self._command),
                holder=f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}",
                memory_mb=self._memory_mb,
                bounds=self._bounds,
                on_tables=self.link.publish,
                on_rows=following.look,
                lease_ttl_s=self._lease_ttl_s,
            )
            self._stack.push_async_callback(placement.close)
            self._stack.push_async_callback(self.controller.close)
        for spec in self._deployments:
            await self._deploy(spec)
        if self.controller is not None:
            self.controller.start()
        self._stack.push_async_callback(self.link.close)
        self.link.start()

    async def close(self) -> None:
        """Ends this server's part. Replicas and streams of other servers go on."""
        await self._stack.aclose()

    async def __aenter__(self) -> DurableFleet:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _deploy(self, spec: DeploymentSpec) -> None:
        try:
            await self.admin.deploy(spec)
        except ConflictError as error:
            # Another server that starts now makes the same, or a rollout is running.
            if not await self._deployed(spec.name):
                raise
            _log.warning("%s stays as it is: %s", spec.name, error.message)

    async def _deployed(self, name: str) -> bool:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            if any(view.name == name for view in await self.admin.deployments()):
                return True
            await asyncio.sleep(0.1)
        return False

    def _stir(self) -> None:
        if self.controller is not None:
            self.controller.stir()


def default_run_folder(url: str) -> Path:
    """The same for every server of this user on this machine that has this database."""
    return private_base() / f"fleet-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
