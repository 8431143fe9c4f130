"""The loop that makes the fleet what it shall be.

Each round reads what shall be and what is, decides without doing anything (`desire`, `reconcile`, `lifecycle`,
`routes`), writes the decision down, and only then acts on it through the placement. A controller that is killed
between any two of these is continued by the next one: what was decided is in the store, what runs is listed by the
placement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from toque.errors import StoreError, ToqueError
from toque.fleet import news
from toque.fleet.decide import Decided, Decider
from toque.fleet.health import POLL_S, HangBounds, HealthSource
from toque.fleet.launch import Launch
from toque.fleet.lifecycle import exists, started
from toque.fleet.placement.base import Node, Observed, Placement
from toque.fleet.signals import FRESH_S
from toque.fleet.store import Change, Committed, DeploymentRow, FleetStore, Lease, ReplicaRow
from toque.routing.base import ReplicaEntry, RoutingTable

LEASE_TTL_S = 8.0  # a standby takes over within 10 s
_EPOCHS = 1_000_000  # of processes, under one holder of the lease

_log = logging.getLogger("toque.fleet")


class Controller:
    """Whoever holds the store's lease acts; the others stand by, and take over when it runs out.

    While the store is away the last state is served: nothing is started or stopped once the lease has run out.
    `rounds` counts what was decided and written; ``on_tables`` hears every table that changed, in the event loop,
    and ``on_rows`` the deployments after each round of a leading controller.
    """

    def __init__(
        self,
        store: FleetStore,
        placement: Placement,
        health: HealthSource,
        launch: Launch,
        *,
        holder: str,
        memory_mb: int = 0,
        bounds: HangBounds | None = None,
        on_tables: Callable[[Mapping[str, RoutingTable]], None] = lambda tables: None,
        on_rows: Callable[[Mapping[str, DeploymentRow]], None] = lambda rows: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
        lease_ttl_s: float = LEASE_TTL_S,
    ) -> None:
        """``memory_mb``: what all replicas together may take; 0: nine tenths of what there is. ``lease_ttl_s``: after
        so long without a sign of life another controller takes over."""
        self._store = store
        self._placement = placement
        self._health = health
        self._launch = launch
        self._holder = holder
        self._memory_mb = memory_mb
        self._on_tables = on_tables
        self._on_rows = on_rows
        self._clock = clock
        self._monotonic = monotonic
        self._poll_s = poll_s
        self._lease_ttl_s = lease_ttl_s
        self._decider = Decider(bounds or HangBounds())
        self._lease: Lease | None = None
        self._epochs = 0
        self._stored: dict[str, ReplicaRow] = {}  # as they were last written
        self._unsure = False  # whether they were
        self._tables: Mapping[str, RoutingTable] | None = None
        self._stopping: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._stirred = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.replicas: dict[str, ReplicaRow] = {}
        self.rounds = 0

    @property
    def leading(self) -> bool:
        return self._lease is not None and self._clock() < self._lease.until

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(), name="fleet controller"),
            loop.create_task(self._listen(), name="fleet events"),
        ]

    def stir(self) -> None:
        """Something may have changed: look now rather than at the next poll."""
        self._stirred.set()

    async def close(self) -> None:
        """Stops deciding, and gives the lease back. Replicas go on as they are."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stop in self._stopping.values():
            stop.cancel()
        await self._health.close()
        if self._lease is not None:
            with contextlib.suppress(StoreError):
                await self._store.release(self._lease)
            self._lease = None

    async def stop_replicas(self, grace_s: float) -> None:
        """After `close`: ends every replica. What runs gets the grace."""
        # A moment more than it gives itself: it ends what is left of its requests with an error of its own.
        grace_s = grace_s + 1.0 if grace_s else 0.0
        listed = await self._placement.list()
        await asyncio.gather(*(self._placement.stop(each.replica_id, each.epoch, grace_s) for each in listed))

    async def round(self) -> bool:
        """Looks, decides, writes and acts, once. False if something else was written meanwhile: look again."""
        now = self._clock()
        if not await self._hold(now):
            return True
        lease = self._lease
        assert lease is not None
        if self._unsure:
            self._stored = {row.id: row for row in await self._store.replicas()}
            self._tables, self._unsure = None, False
        deployments = await self._store.deployments()
        observed = {(each.replica_id, each.epoch): each for each in await self._placement.list()}
        reported = await self._store.reported(now - FRESH_S)
        self._health.follow(
            ReplicaEntry(row.id, row.epoch, row.address)
            for row in self.replicas.values()
            if exists(row) and (row.id, row.epoch) in observed
        )
        decided = self._decider.decide(
            deployments,
            self.replicas,
            observed,
            self._health.health,
            reported,
            limit_mb=await self._limit_mb(),
            now=now,
            monotonic=self._monotonic(),
        )
        self.replicas = decided.survivors
        after = self._launched(decided, now)
        change = self._change(deployments, decided, after)
        if change:
            try:
                committed = await self._store.commit(lease, change)
            except StoreError:
                self._unsure = True  # it may have been written all the same
                raise
            if committed is Committed.FENCED:
                self._depose("another controller has taken the lease")
                return True
            if committed is Committed.CONFLICT:
                return False
        for line in (
            *news.of_deployments(deployments, decided.deployments),
            *news.of_replicas(self._stored, after),
        ):
            _log.info("%s", line)
        self.replicas, self._stored = after, dict(after)
        self.rounds += 1
        if change.tables is not None:
            self._tables = change.tables
            self._on_tables(change.tables)
        await self._act(decided, deployments, observed)
        self._on_rows(decided.deployments)
        return True

    async def _run(self) -> None:
        away = ""
        while True:
            self._stirred.clear()
            try:
                settled = await self.round()
                if away:
                    _log.info("the fleet's store is back")
                away = ""
            except StoreError as error:
                if not away:
                    _log.warning("the fleet stays as it is: %s", error.message)
                settled, away = True, error.message
            except Exception:
                # A round that fails must not be the last: what it met may be gone at the next one.
                _log.exception("a round of the controller failed")
                settled = True
            if settled:
                # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._stirred.wait()

    async def _listen(self) -> None:
        async for _ in self._placement.watch():
            self.stir()

    async def _hold(self, now: float) -> bool:
        """Whether this is the controller, now. A new one begins with what the store and the placement have."""
        held = self._lease
        if held is not None and now < held.until - self._lease_ttl_s * 2 / 3:
            return True
        try:
            lease = await self._store.hold(self._holder, now, self._lease_ttl_s)
        except StoreError:
            if held is not None and now < held.until:
                return True
            raise
        if lease is None:
            if held is not None:
                self._depose("another controller has taken the lease")
            return False
        if held is None or held.epoch != lease.epoch:
            rows = await self._store.replicas()
            self.replicas = {row.id: row for row in rows}
            self._stored = dict(self.replicas)
            first = (lease.epoch - 1) * _EPOCHS
            self._epochs = max([first, *(row.epoch for row in rows)])
            self._tables = None
            if lease.epoch > 1:
                _log.info(
                    "this controller leads now, under epoch %d, with %d replicas", lease.epoch, len(rows)
                )
        self._lease = lease
        return True

    def _depose(self, why: str) -> None:
        _log.warning("this controller stands by: %s", why)
        self._lease = None
        self._health.follow(())
        for task in self._stopping.values():
            task.cancel()
        self._stopping.clear()

    async def _limit_mb(self) -> int:
        if self._memory_mb:
            return self._memory_mb
        nodes: Sequence[Node] = await self._placement.capacity()
        return sum(node.total_bytes for node in nodes) * 9 // 10 >> 20

    def _launched(self, decided: Decided, now: float) -> dict[str, ReplicaRow]:
        """The rows after the decision: what is due has its new epoch and address."""
        after = dict(decided.replicas)
        for replica_id in decided.start:
            self._epochs += 1
            row = after[replica_id]
            after[replica_id] = started(row, self._epochs, self._launch.address(self._epochs), now)
        return after

    def _change(
        self, deployments: Mapping[str, DeploymentRow], decided: Decided, after: Mapping[str, ReplicaRow]
    ) -> Change:
        tables = decided.tables(after)
        return Change(
            deployments=tuple(row for name, row in decided.deployments.items() if row != deployments[name]),
            replicas=tuple(row for row in after.values() if row != self._stored.get(row.id)),
            removed=tuple(replica_id for replica_id in self._stored if replica_id not in after),
            dropped=decided.dropped,
            tables=None if tables == self._tables else tables,
        )

    async def _act(
        self,
        decided: Decided,
        deployments: Mapping[str, DeploymentRow],
        observed: Mapping[tuple[str, int], Observed],
    ) -> None:
        for replica_id, epoch in decided.kill:
            self._stop(replica_id, epoch, 0.0)
        for row in self.replicas.values():
            if row.gone and (row.id, row.epoch) in observed:
                deployment = decided.deployments.get(row.deployment)
                self._stop(row.id, row.epoch, deployment.spec.grace_s if deployment else 30.0)
        for replica_id in decided.start:
            row = self.replicas[replica_id]
            deployment = decided.deployments[row.deployment]
            spec = self._launch.spec(row, deployment.revision(row.revision), deployment.spec.grace_s)
            try:
                await self._placement.ensure(spec)
            except ToqueError as error:  # it is not listed, which the next round sees
                _log.warning("replica %s cannot be started: %s", replica_id, error.message)
        if decided.start:
            self.stir()

    def _stop(self, replica_id: str, epoch: int, grace_s: float) -> None:
        """In the background: it may take its grace. Asked again only if it failed, or to be quicker."""
        key = (replica_id, epoch)
        running = self._stopping.get(key)
        if running is not None and grace_s > 0:
            return
        # A moment more than it gives itself: it ends what is left of its requests with an error of its own.
        patience = grace_s + 1.0 if grace_s else 0.0
        task = asyncio.get_running_loop().create_task(self._ended(replica_id, epoch, patience))
        self._stopping[key] = task
        task.add_done_callback(lambda done: self._stopped(key, done))

    async def _ended(self, replica_id: str, epoch: int, patience_s: float) -> None:
        if await self._placement.stop(replica_id, epoch, patience_s):  # no other round sees it gone before
            self._decider.lost(replica_id, epoch, self._monotonic())

    def _stopped(self, key: tuple[str, int], done: asyncio.Task[None]) -> None:
        if self._stopping.get(key) is done:
            del self._stopping[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.warning("replica %s could not be stopped: %s", key[0], error)
        self.stir()
