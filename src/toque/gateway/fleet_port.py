"""Where a gateway meets the fleet: tables come in and make deployments, and what is seen of them goes back."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from toque.gateway.deployment import Deployment, FleetDeployment
from toque.gateway.face import Face, load_face
from toque.gateway.faces import FaceLoader
from toque.routing.base import DeploymentSignals, RoutingTable
from toque.routing.target import OpenSession, open_session

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.fleet.link import FleetLink
    from toque.monitor.latency import Latencies

REPORT_S = 0.5
REST_S = 60.0
TABLES_S = 3.0
_RETIRE_S = 60.0


class FleetPort:
    """Keeps ``deployments`` those of the tables that ``link`` brings, from `start` to `close`.

    A deployment that is there when the first tables come is expected: the gateway is not ready without it. One that
    comes later counts once it has been ready, so that adding a model takes no gateway out of service.
    """

    def __init__(
        self,
        deployments: dict[str, Deployment],
        link: FleetLink,
        limits: LimitSettings,
        latencies: Latencies,
        *,
        public_names: Mapping[str, str] | None = None,
        hedge_after_s: float = 0.0,
        load: Callable[..., Face] = load_face,
        open_session: OpenSession = open_session,
        rest_after_s: float = REST_S,
    ) -> None:
        """``public_names``: what clients call a deployment, where that is not its name in the fleet. ``load`` reads a
        version's face, as `load_face`; ``open_session`` connects to a replica. ``rest_after_s``: a deployment without
        replicas that nobody has asked for so long lets go of its tokenizers."""
        self._deployments = deployments
        self._link = link
        self._limits = limits
        self._latencies = latencies
        self._public_names = public_names or {}
        self._hedge_after_s = hedge_after_s
        self._load = load
        self._open_session = open_session
        self._rest_after_s = rest_after_s
        self._known: dict[str, FleetDeployment] = {}  # by their names in the fleet
        self._retiring: set[asyncio.Task[None]] = set()
        self._settled = False
        self._changed = asyncio.Event()
        self._gateway_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        # One thread: faces that are read beside the streams take one core at most.
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="toque-face")
        self._unsubscribe: Callable[[], None] = lambda: None
        self._reporting: asyncio.Task[None] | None = None
        self._urgent = False

    def start(self) -> None:
        self._unsubscribe = self._link.subscribe(self._apply)
        self._reporting = asyncio.get_running_loop().create_task(self._report_on(), name="fleet reports")

    async def close(self) -> None:
        self._unsubscribe()
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait([self._reporting])
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(deployment.close() for deployment in self._known.values()))
        self._loading.shutdown(wait=False, cancel_futures=True)

    async def until_settled(self, wanted: int = 0) -> None:
        """Returns once all deployments that are expected are ready, and at least ``wanted`` are there.

        With none wanted, those of the first tables are waited for, and the tables for a moment. UnavailableError names
        a deployment that cannot be.
        """
        if not wanted and not self._settled:
            with suppress(TimeoutError):
                async with asyncio.timeout(TABLES_S):
                    await self._changed.wait()
        while True:
            expected = [deployment for deployment in self._known.values() if deployment.expected]
            if len(self._known) >= wanted and all(deployment.ready for deployment in expected):
                return
            for deployment in expected:
                deployment.check_possible()
            changed = self._changed
            await changed.wait()

    def _apply(self, tables: Mapping[str, RoutingTable]) -> None:
        for name in [name for name in self._known if name not in tables]:
            self._retire(name)
        for name, table in tables.items():
            deployment = self._known.get(name)
            if deployment is None:
                deployment = self._known[name] = self._made(name, table)
                self._deployments[deployment.name] = deployment
            deployment.apply(table)
        self._settled = self._settled or bool(tables)
        self._stir()

    def _made(self, name: str, table: RoutingTable) -> FleetDeployment:
        load: FaceLoader = partial(self._load, limits=self._limits, tool_parser=table.tool_parser)
        return FleetDeployment(
            self._public_names.get(name, name),
            self._limits,
            load,
            self._loading,
            open_session=self._open_session,
            hedge_after_s=self._hedge_after_s,
            expected=not self._settled,
            on_change=self._stir,
            on_wait=self._report_soon,
        )

    def _retire(self, name: str) -> None:
        """It is gone: nothing new is taken, and what runs may end."""
        deployment = self._known.pop(name)
        if self._deployments.get(deployment.name) is deployment:
            del self._deployments[deployment.name]
        deployment.retire()
        task = asyncio.get_running_loop().create_task(_ended(deployment))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _stir(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # Reports

    def _report_soon(self) -> None:
        """Something waits: the fleet hears of it now, once for all that begin to wait together."""
        if not self._urgent:
            self._urgent = True
            asyncio.get_running_loop().call_soon(self._report)

    async def _report_on(self) -> None:
        while True:
            self._report()
            for deployment in self._known.values():
                deployment.rest(self._rest_after_s)
            await asyncio.sleep(REPORT_S)

    def _report(self) -> None:
        self._urgent = False
        self._link.report(self._gateway_id, [self._signals(name) for name in self._known])

    def _signals(self, name: str) -> DeploymentSignals:
        deployment = self._known[name]
        window = self._latencies.rolling(deployment.name, "ttft").window(60, time.perf_counter())
        ttft_p95_s = window.quantiles((0.95,))[0] if window.count else 0.0
        return replace(deployment.signals(), deployment=name, ttft_p95_s=ttft_p95_s)


async def _ended(deployment: FleetDeployment) -> None:
    until = time.monotonic() + _RETIRE_S
    while deployment.here and time.monotonic() < until:
        await deployment.pool.changed(time.monotonic() + REPORT_S)
    await deployment.close()
