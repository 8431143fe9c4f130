"""The fleet's stores keep the same promises: in memory, in SQLite, in PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fixtures.postgres import Server, binaries, server
from toque.errors import StoreError
from toque.fleet.revisions import first_row
from toque.fleet.rollout import begin
from toque.fleet.spec import DeploymentSpec, RolloutPolicy
from toque.fleet.sql_store import SqlFleetStore, digests_in_use
from toque.fleet.store import (
    Change,
    Committed,
    DeploymentRow,
    FleetStore,
    Lease,
    MemoryFleetStore,
    ReplicaRow,
    Reported,
    Revision,
)
from toque.registry.database import SCHEMA, RegistryDatabase
from toque.routing.base import (
    DeploymentSignals,
    ReplicaEntry,
    ReplicaState,
    RoutingTable,
    ServedVersion,
    VersionOutcomes,
)

_names = (f"fleet{number}" for number in itertools.count())
needs_postgres = pytest.mark.skipif(binaries() is None, reason="PostgreSQL's programs are not installed")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:  # its path bounds a socket's name
        os.chmod(folder, 0o755)
        with server(Path(folder)) as running:
            yield running


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FleetStore]:
    opened: FleetStore
    if request.param == "memory":
        opened = MemoryFleetStore()
    elif request.param == "sqlite":
        opened = SqlFleetStore(f"sqlite:///{tmp_path}/registry.db")
    else:
        opened = SqlFleetStore(request.getfixturevalue("postgres").database(next(_names)))
    yield opened
    await opened.close()


def row(name: str = "m", memory_mb: int = 100) -> DeploymentRow:
    pinned = Revision("", "/models/v1", "/models/v1", "d1", "v1", memory_mb=memory_mb)
    made = first_row(DeploymentSpec(name, "/models/v1", {"max_sequences": 4}), pinned, 5.0)
    return replace(made, rollout=begin(1, made.current, "new", RolloutPolicy(), 7.0))


async def leader(store: FleetStore) -> Lease:
    lease = await store.hold("one", 100.0, 10.0)
    assert lease is not None
    return lease


async def test_a_deployment_is_what_was_put(store: FleetStore) -> None:
    assert await store.deployments() == {}
    assert await store.put(row())
    assert await store.deployments() == {"m": replace(row(), stamp=1)}
    assert not await store.put(row())  # there is one already
    changed = replace(row(), stamp=1, stopped=True)
    assert await store.put(changed)
    assert not await store.put(changed)  # it was written meanwhile
    assert await store.deployments() == {"m": replace(changed, stamp=2)}


async def test_a_change_is_all_or_nothing(store: FleetStore) -> None:
    lease = await leader(store)
    await store.put(row("a"))
    await store.put(row("b"))
    before = await store.deployments()
    replica = ReplicaRow("a-0", "a", "d1", 3, "/run/r3", "77", ReplicaState.READY, memory_mb=5, ready_at=1.5)
    entries = (ReplicaEntry("a-0", 3, "/run/r3", ReplicaState.READY, "", "d1"),)
    table = RoutingTable(
        "a", entries, {"d1": ServedVersion("d1", Path("/models/v1"), "d1", "v1", {"threads": 2})}, {"d1": 1.0}
    )
    change = Change((replace(before["a"], target=1),), (replica,), (), (), {"a": table})
    await store.put(replace(before["b"], stopped=True))
    bad = replace(change, deployments=(*change.deployments, replace(before["b"], target=1)))
    assert await store.commit(lease, bad) is Committed.CONFLICT
    assert (await store.deployments())["a"] == before["a"]
    assert await store.replicas() == []
    assert await store.commit(lease, change) is Committed.WRITTEN
    assert (await store.deployments())["a"].target == 1
    assert await store.replicas() == [replica]
    found = await store.tables(after=-1)
    assert found is not None
    number, tables = found
    assert tables == {"a": table}
    assert await store.tables(after=number) is None
    assert await store.commit(lease, Change(removed=("a-0",), dropped=("a",), tables={})) is Committed.WRITTEN
    assert await store.replicas() == []
    assert set(await store.deployments()) == {"b"}
    found = await store.tables(after=number)
    assert found is not None
    assert found[1] == {}


async def test_there_is_one_leader_and_its_epoch_fences(store: FleetStore) -> None:
    first = await leader(store)
    assert await store.hold("two", 105.0, 10.0) is None
    again = await store.hold("one", 105.0, 10.0)
    assert again is not None
    assert (again.epoch, again.until) == (first.epoch, 115.0)
    second = await store.hold("two", 116.0, 10.0)
    assert second is not None
    assert second.epoch == first.epoch + 1
    assert await store.commit(first, Change(tables={})) is Committed.FENCED
    await store.release(first)  # it is not its any more
    assert await store.hold("one", 117.0, 10.0) is None
    await store.release(second)
    third = await store.hold("one", 117.0, 10.0)
    assert third is not None
    assert third.epoch == first.epoch + 2


async def test_reports_are_the_latest_of_each_gateway(store: FleetStore) -> None:
    counted = VersionOutcomes(3, 1, 2, 0.5, 0.25, (1, 2), (3,))
    early = Reported("g", 10.0, DeploymentSignals("m", waiting=1))
    late = Reported("g", 20.0, DeploymentSignals("m", running=1, outcomes={"d1": counted}))
    other = Reported("h", 20.0, DeploymentSignals("m", waiting=2))
    await store.report([early])
    await store.report([late, other])
    assert sorted(await store.reported(0.0), key=lambda each: each.gateway_id) == [late, other]
    await store.report([replace(other, at=30.0)])
    assert [each.gateway_id for each in await store.reported(25.0)] == ["h"]


async def test_two_that_hold_for_the_first_time_do_not_both_lead(tmp_path: Path) -> None:
    stores = [SqlFleetStore(f"sqlite:///{tmp_path}/registry.db") for _ in range(3)]
    held = await asyncio.gather(*(each.hold(str(n), 1.0, 10.0) for n, each in enumerate(stores)))
    assert sum(lease is not None for lease in held) == 1
    for each in stores:
        await each.close()


@needs_postgres
async def test_a_database_that_hangs_is_away_within_seconds_and_late_writes_are_undone(
    postgres: Server,
) -> None:
    url = postgres.database(next(_names))
    calm, store = SqlFleetStore(url, patience_s=60), SqlFleetStore(url, patience_s=0.5)
    try:
        await calm.put(row())
        known = await calm.deployments()
        running = set(threading.enumerate())
        stopped = postgres.pids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(StoreError, match="has not answered"):
                    await store.put(replace(known["m"], stopped=True))
            for _ in range(20):  # at once, while the first one hangs: without even a turn of the event loop
                with pytest.raises(StoreError, match="has not answered"):
                    store.deployments().send(None)
            assert set(threading.enumerate()) <= running  # all of them its one thread, which was there
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while True:  # until the thread is free, what it had begun undone
                try:
                    assert await store.deployments() == known
                    break
                except StoreError:
                    await asyncio.sleep(0.05)
        assert await calm.deployments() == known
    finally:  # also after a failure: a connection that is left open is told of in another test
        await store.close()
        await calm.close()


async def test_the_digests_of_all_revisions_are_in_use(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    store = SqlFleetStore(url)
    newer = Revision("d2", "/models/v2", "/models/v2", "d2")
    await store.put(replace(row(), revisions=(*row().revisions, newer)))
    await store.put(replace(row("n"), revisions=(Revision("/x", "/x", "/x"),)))
    await store.close()
    database = RegistryDatabase(url)
    assert digests_in_use(database) == {"d1", "d2"}
    database.close()


def test_migrations_make_the_fleets_tables(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from toque.registry.tables import metadata

    database = RegistryDatabase(f"sqlite:///{tmp_path}/registry.db")
    with database.read() as connection:
        options = {"version_table": SCHEMA.version_table, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
    database.close()
