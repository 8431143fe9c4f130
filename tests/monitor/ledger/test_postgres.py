"""The ledger on a real PostgreSQL: the same rows, sums and answers as SQLite, and what a stopped server does."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.postgres import Server, binaries, server
from toque.errors import StoreError
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome
from toque.monitor.ledger.tables import ROLLUPS
from toque.monitor.ledger.usage import UsageQuery, usage

from .rows import START, Maker
from .test_database import by_hand, dump, stored

pytestmark = pytest.mark.skipif(binaries() is None, reason="PostgreSQL's programs are not installed")
_names = (f"ledger{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:  # its path bounds a socket's name
        os.chmod(folder, 0o755)
        with server(Path(folder)) as running:
            yield running


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.database(next(_names))


def test_rows_and_rollups_are_those_of_sqlite(url: str, tmp_path: Path) -> None:
    databases = [Database(url), Database(f"sqlite:///{tmp_path}/ledger.db")]
    maker = Maker(1)
    closed = [maker.closed() for _ in range(200)]
    for database in databases:
        for start in range(0, 200, 70):
            database.apply(closed[start : start + 70])
        assert database.apply(closed) == 0
        for rollup in ROLLUPS:
            rows = +stored(database, rollup.table.name, rollup.groups)
            assert rows == +by_hand(closed, rollup.seconds, rollup.groups)
    one, other = databases
    for table in ("usage_event", "usage_attempt"):
        assert dump(one, table) == dump(other, table)
    for by in ((), ("model",), ("tenant", "day"), ("hour", "key")):
        query = UsageQuery(by, 0, START + 10**7)
        rows = [sorted(map(repr, usage(database, query).rows)) for database in databases]
        assert rows[0] == rows[1]
    cut = START + 86_400
    assert (
        one.expire(events_before=cut, hours_before=cut)
        == other.expire(events_before=cut, hours_before=cut)
        > 0
    )
    assert dump(one, "usage_event") == dump(other, "usage_event")
    for database in databases:
        database.close()


def test_several_gateways_start_and_write_at_once(url: str) -> None:
    errors: list[Exception] = []

    def gateway(seed: int) -> None:
        try:
            database, maker = Database(url), Maker(seed)  # all of them find no tables
            for _ in range(10):
                database.apply([maker.closed() for _ in range(20)])
            database.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=gateway, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    database = Database(url)
    assert len(dump(database, "usage_event")) == 800
    assert sum(row[6] for row in dump(database, "usage_day")) == 800
    database.close()


def test_a_server_that_stops_answering_is_waited_for(postgres: Server, url: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, url=url, apply_s=0.02, stalled_s=0.3)
    ledger.start()
    ledger.open("before", endpoint="e", model="m").close(Outcome.OK, 200)
    assert ledger.flush()
    pids = postgres.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(100):
            ledger.open(f"r{number}", endpoint="e", model="m").close(Outcome.OK, 200)
        until = time.monotonic() + 60
        while ledger.status().state != "buffering":
            assert time.monotonic() < until
            time.sleep(0.01)
        assert "has not answered" in ledger.status().reason
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert ledger.flush()
    ledger.close()
    database = Database(url)
    assert len(dump(database, "usage_event")) == 101
    database.close()


def test_a_connection_that_breaks_is_made_anew_and_nothing_doubles(
    postgres: Server, url: str, tmp_path: Path
) -> None:
    import psycopg

    ledger = Ledger(tmp_path, url=url, apply_s=0.02)
    ledger.start()
    for number in range(150):
        ledger.open(f"r{number}", endpoint="e", model="m").close(Outcome.OK, 200)
        if number % 50 == 25:
            with psycopg.connect(url) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
    assert ledger.flush(20)
    ledger.close()
    database = Database(url)
    assert len(dump(database, "usage_event")) == 150
    assert sum(row[6] for row in dump(database, "usage_day")) == 150
    database.close()


def test_a_server_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be used") as refused:
        Database(f"postgresql://toque:secret@/x?host={tmp_path}")
    assert "secret" not in refused.value.message
