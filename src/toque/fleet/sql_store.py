"""The fleet in the registry's database: it outlives every process, and several gateways share it.

SQLAlchemy is imported with this file, which is why nothing that stands before a server's readiness may import it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Table, delete, select, update

from toque.errors import StoreError
from toque.fleet import tables
from toque.fleet.store import Change, Committed, DeploymentRow, Lease, ReplicaRow, Reported
from toque.fleet.store_thread import StoreThread
from toque.registry.database import RegistryDatabase
from toque.routing.base import DeploymentSignals, RoutingTable

PATIENCE_S = 3.0  # the database has to answer within
_LEASE = "controller"
_ROUTING = "tables"
_KEPT_S = 60.0  # reports of gateways that are gone

T = TypeVar("T")


class SqlFleetStore:
    """A FleetStore. One thread talks to the database, so that calls neither pile up nor overtake each other.

    A call that takes more than ``patience_s`` fails with StoreError, and so do those after it until the thread is
    free again. What it had begun to write is not committed when the database comes back.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date; blocks meanwhile."""
        self._database = RegistryDatabase(url)
        self._patience_s = patience_s
        self._thread = StoreThread("fleet-store")
        self._stuck: asyncio.Future[Any] | None = None
        self._known: dict[str, DeploymentRow] = {}

    async def deployments(self) -> dict[str, DeploymentRow]:
        table = tables.deployment

        def read(connection: Connection) -> dict[str, DeploymentRow]:
            stamps = {row.name: row.stamp for row in connection.execute(select(table.c.name, table.c.stamp))}
            known = {name: row for name, row in self._known.items() if stamps.get(name) == row.stamp}
            missing = [name for name in stamps if name not in known]
            for part in _parts(missing):
                query = select(table.c.document, table.c.stamp).where(table.c.name.in_(part))
                for document, stamp in connection.execute(query):
                    row = replace(msgspec.json.decode(document, type=DeploymentRow), stamp=stamp)
                    known[row.name] = row
            self._known = known
            return {name: known[name] for name in sorted(known)}

        return await self._read(read)

    async def put(self, row: DeploymentRow) -> bool:
        return await self._write(lambda connection: self._put(connection, row))

    async def replicas(self) -> list[ReplicaRow]:
        query = select(tables.replica.c.document).order_by(tables.replica.c.id)

        def read(connection: Connection) -> list[ReplicaRow]:
            return [msgspec.json.decode(text, type=ReplicaRow) for text in connection.scalars(query)]

        return await self._read(read)

    async def commit(self, lease: Lease, change: Change) -> Committed:
        def write(connection: Connection) -> Committed:
            held = select(tables.lease.c.epoch).where(tables.lease.c.name == _LEASE).with_for_update()
            if connection.scalar(held) != lease.epoch:
                return Committed.FENCED
            with connection.begin_nested() as part:
                if not all(self._put(connection, row) for row in change.deployments):
                    part.rollback()
                    return Committed.CONFLICT
            if change.replicas:
                rows = [_replica_values(row) for row in change.replicas]
                connection.execute(self._upsert(tables.replica, ("id",)), rows)
            for names in _parts(change.removed):
                connection.execute(delete(tables.replica).where(tables.replica.c.id.in_(names)))
            for names in _parts(change.dropped):
                connection.execute(delete(tables.deployment).where(tables.deployment.c.name.in_(names)))
            if change.tables is not None:
                self._put_tables(connection, change.tables)
            return Committed.WRITTEN

        return await self._write(write)

    async def tables(self, after: int) -> tuple[int, Mapping[str, RoutingTable]] | None:
        table = tables.routing

        def read(connection: Connection) -> tuple[int, Mapping[str, RoutingTable]] | None:
            query = select(table.c.number, table.c.document).where(
                table.c.name == _ROUTING, table.c.number != after
            )
            found = connection.execute(query).one_or_none()
            if found is None:
                return None
            decoded = msgspec.json.decode(found.document, type=dict[str, RoutingTable], dec_hook=_read_path)
            return found.number, decoded

        return await self._read(read)

    async def report(self, reported: Sequence[Reported]) -> None:
        rows = [
            {
                "gateway": each.gateway_id,
                "deployment": each.signals.deployment,
                "at": each.at,
                "document": _json(each.signals),
            }
            for each in reported
        ]
        if rows:
            statement = self._upsert(tables.gateway_signal, ("gateway", "deployment"))
            await self._write(lambda connection: connection.execute(statement, rows))

    async def reported(self, since: float) -> list[Reported]:
        table = tables.gateway_signal
        query = select(table.c.gateway, table.c.at, table.c.document).where(table.c.at >= since)

        def read(connection: Connection) -> list[Reported]:
            return [
                Reported(gateway, at, msgspec.json.decode(document, type=DeploymentSignals))
                for gateway, at, document in connection.execute(query)
            ]

        return await self._read(read)

    async def hold(self, holder: str, now: float, ttl_s: float) -> Lease | None:
        table = tables.lease

        def write(connection: Connection) -> Lease | None:
            query = select(table.c.holder, table.c.epoch, table.c.until).where(table.c.name == _LEASE)
            found = connection.execute(query.with_for_update()).one_or_none()
            if found is not None and found.holder not in ("", holder) and found.until > now:
                return None
            before = Lease("", 0, 0.0) if found is None else Lease(*found)
            held = Lease(holder, before.epoch + (before.holder != holder), now + ttl_s)
            values = {"name": _LEASE, **msgspec.structs.asdict(held)}
            if found is not None:
                connection.execute(update(table).where(table.c.name == _LEASE), values)
            elif not connection.execute(
                self._database.insert(table).on_conflict_do_nothing(), values
            ).rowcount:
                return None  # somebody else was the first
            signals = tables.gateway_signal
            connection.execute(delete(signals).where(signals.c.at < now - _KEPT_S))
            return held

        return await self._write(write)

    async def release(self, lease: Lease) -> None:
        table = tables.lease
        mine = (table.c.name == _LEASE) & (table.c.epoch == lease.epoch)
        await self._write(
            lambda connection: connection.execute(update(table).where(mine), {"holder": "", "until": 0.0})
        )

    async def close(self) -> None:
        """Does not wait for a database that does not answer."""
        closing = self._thread.call(self._database.close)
        self._thread.end()
        if self._stuck is None or self._stuck.done():
            await closing
        else:
            closing.add_done_callback(_heard)

    def _put(self, connection: Connection, row: DeploymentRow) -> bool:
        table = tables.deployment
        values = {
            "name": row.name,
            "reference": row.spec.model,
            "current": row.current,
            "generation": row.generation,
            "observed_generation": row.observed_generation,
            "stamp": row.stamp + 1,
            "document": _json(row),
        }
        if row.stamp == 0:
            return self._insert(connection, table, values)
        same = (table.c.name == row.name) & (table.c.stamp == row.stamp)
        return bool(connection.execute(update(table).where(same), values).rowcount)

    def _insert(self, connection: Connection, table: Table, values: Mapping[str, object]) -> bool:
        """False if there is such a row."""
        statement = (
            self._database.insert(table).on_conflict_do_nothing().returning(table.primary_key.columns[0])
        )
        return connection.execute(statement, values).one_or_none() is not None

    def _put_tables(self, connection: Connection, every: Mapping[str, RoutingTable]) -> None:
        table = tables.routing
        statement = self._database.insert(table)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["name"],
                set_={"number": table.c.number + 1, "document": statement.excluded.document},
            ),
            {"name": _ROUTING, "number": 1, "document": _json(every)},
        )

    def _upsert(self, table: Table, key: tuple[str, ...]) -> Any:
        statement = self._database.insert(table)
        changes = {
            column.name: statement.excluded[column.name] for column in table.c if column.name not in key
        }
        return statement.on_conflict_do_update(index_elements=list(key), set_=changes)

    async def _read(self, query: Callable[[Connection], T]) -> T:
        def run(abandoned: threading.Event) -> T:
            with self._database.read() as connection:
                return query(connection)

        return await self._call(run)

    async def _write(self, change: Callable[[Connection], T]) -> T:
        def run(abandoned: threading.Event) -> T:
            with self._database.write() as connection:
                result = change(connection)
                if abandoned.is_set():  # whoever asked was told that it failed
                    raise StoreError("the database answered too late")
                return result

        return await self._call(run)

    async def _call(self, run: Callable[[threading.Event], T]) -> T:
        if self._stuck is not None and not self._stuck.done():
            raise self._silent()
        abandoned = threading.Event()
        future = self._thread.call(lambda: run(abandoned))
        try:
            done, _ = await asyncio.wait([future], timeout=self._patience_s)
        except asyncio.CancelledError:
            abandoned.set()
            self._stuck = future
            future.add_done_callback(_heard)
            raise
        if not done:
            abandoned.set()
            self._stuck = future
            future.add_done_callback(_heard)
            raise self._silent()
        return future.result()

    def _silent(self) -> StoreError:
        return StoreError(
            f"the registry {self._database.url} has not answered for more than {self._patience_s:g} s"
        )


def digests_in_use(database: RegistryDatabase) -> set[str]:
    """Digests of the versions that deployments run, roll out to, or may be taken back to: not to be removed."""
    with database.read() as connection:
        documents = list(connection.scalars(select(tables.deployment.c.document)))
    rows = [msgspec.json.decode(document, type=DeploymentRow) for document in documents]
    return {revision.digest for row in rows for revision in row.revisions if revision.digest}


def _heard(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more."""
    if not future.cancelled():
        future.exception()


def _replica_values(row: ReplicaRow) -> dict[str, object]:
    return {
        "id": row.id,
        "deployment": row.deployment,
        "epoch": row.epoch,
        "state": row.state.value,
        "address": row.address,
        "document": _json(row),
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()  # the hook is for paths


def _read_path(kind: type[Any], value: object) -> object:
    return Path(str(value)) if issubclass(kind, Path) else value


def _parts(ids: Iterable[str], size: int = 500) -> Iterable[list[str]]:
    every = list(ids)
    for start in range(0, len(every), size):
        yield every[start : start + size]
