"""The tables hold each request once, and the roll-ups are what a plain loop over the rows makes of them."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pytest
from sqlalchemy import delete, insert

from toque.errors import ConfigError, StoreError
from toque.monitor.ledger.database import SCHEMA, Database
from toque.monitor.ledger.record import Outcome, UsageRecord, decode, encode
from toque.monitor.ledger.rollup import fold
from toque.monitor.ledger.tables import GROUPS, KEY_HOURS, MEASURES, ROLLUPS, metadata
from toque.sql import RejectedError

from .rows import START, Maker


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/ledger.db")
    yield made
    made.close()


def dump(database: Database, table: str) -> list[tuple[object, ...]]:
    with database.read() as connection:
        return sorted(tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {table}"))


def by_hand(
    records: list[UsageRecord], seconds: int, groups: tuple[str, ...] = GROUPS
) -> Counter[tuple[object, ...]]:
    """Every measure of every group, added up the slow way."""
    sums: Counter[tuple[object, ...]] = Counter()
    for record in records:
        group = (record.closed_at // (seconds * 1_000_000) * seconds, *(getattr(record, g) for g in groups))
        for measure in MEASURES:
            if measure == "requests":
                value = 1
            elif measure in ("ok", "cancelled", "failed", "refused", "lost"):
                value = int(record.outcome == measure)
            else:
                value = getattr(record, measure)
            sums[(*group, measure)] += value
    return sums


def stored(database: Database, table: str, groups: tuple[str, ...] = GROUPS) -> Counter[tuple[object, ...]]:
    with database.read() as connection:
        sums: Counter[tuple[object, ...]] = Counter()
        for row in connection.exec_driver_sql(f"SELECT * FROM {table}").mappings():
            for measure in MEASURES:
                sums[(row["bucket"], *(row[g] for g in groups), measure)] += row[measure]
        return sums


@pytest.mark.parametrize("seed", range(4))
def test_rollups_equal_the_rows_whatever_the_batches_and_duplicates(database: Database, seed: int) -> None:
    maker, rng = Maker(seed), random.Random(seed)
    closed = [maker.closed() for _ in range(150)]
    log: list[UsageRecord] = []
    for record in closed:
        opened = copy(record)
        opened.outcome, opened.closed_at, opened.completion_tokens = Outcome.OPEN.value, 0, 0
        log += (
            [opened] * rng.choice([0, 1, 2])
            + [record] * rng.choice([1, 1, 2])
            + [opened] * rng.choice([0, 0, 1])
        )
    total, position = 0, 0
    while position < len(log):
        size = rng.randrange(1, 40)
        total += database.apply(log[position : position + size])
        if rng.random() < 0.3:  # the process died after the commit, before it noted the position
            assert database.apply(log[position : position + size]) == 0
        position += size
    assert total == 150
    for rollup in ROLLUPS:
        rows = +stored(database, rollup.table.name, rollup.groups)
        assert rows == +by_hand(closed, rollup.seconds, rollup.groups)
    before = {table: dump(database, table) for table in metadata.tables}
    assert len(before["usage_event"]) == 150
    assert len(before["usage_attempt"]) == sum(len(record.attempts) for record in closed)
    assert database.apply(log) == 0
    database.rebuild()
    assert before == {table: dump(database, table) for table in before}


def test_a_closed_row_never_changes(database: Database) -> None:
    record = Maker().closed(outcome="ok", completion_tokens=7)
    database.apply([record])
    other = copy(record)
    other.completion_tokens, other.outcome = 99, "failed"
    assert database.apply([other]) == 0
    (row,) = database.find(record.request_id)
    assert (row["completion_tokens"], row["outcome"]) == (7, "ok")


def test_a_row_says_what_its_record_said(database: Database) -> None:
    records = [Maker(9).closed() for _ in range(1)]
    database.apply([decode(encode(record)) for record in records])
    (row,) = database.find(records[0].request_id)
    row["attempts"] = [list(attempt.values())[1:] for attempt in row["attempts"]]
    for name in UsageRecord.__struct_fields__:
        if name != "attempts":
            assert row[name] == getattr(records[0], name), name


def test_orphans_are_the_open_rows_of_earlier_processes_of_this_gateway(database: Database) -> None:
    maker = Maker()
    rows = [
        maker.closed(gateway=gateway, outcome="open", closed_at=0)
        for gateway in ("gw.1", "gw.2", "gw_.1", "other.1", "gw.1")
    ]
    database.apply([*rows, maker.closed(gateway="gw.1")])
    found = {record.request_id for record in database.orphans("gw", "gw.2")}
    assert found == {rows[0].request_id, rows[4].request_id}


def test_old_rows_go_and_their_days_stay(database: Database) -> None:
    maker = Maker(5, days=4)
    records = [maker.closed() for _ in range(200)]
    database.apply(records)
    days = dump(database, "usage_day")
    cut = START + 2 * 86_400
    while database.expire(events_before=cut, hours_before=cut, limit=30):
        pass
    left = [record for record in records if record.closed_at >= cut * 1_000_000]
    assert 0 < len(left) < 200
    assert {row[0] for row in dump(database, "usage_event")} == {record.request_id for record in left}
    for hours in ("usage_hour", "usage_key_hour"):
        assert min(row[0] for row in dump(database, hours)) >= cut
    assert dump(database, "usage_day") == days


def test_two_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    errors: list[Exception] = []

    def write(seed: int) -> None:
        try:
            mine, maker = Database(url), Maker(seed)
            for _ in range(15):
                mine.apply([maker.closed() for _ in range(10)])
            mine.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    database = Database(url)
    assert len(dump(database, "usage_event")) == 300
    assert sum(row[6] for row in dump(database, "usage_hour")) == 300
    database.close()


def test_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    import toque.monitor.ledger

    with database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": "ledger_version", "compare_type": True}
        )
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == SCHEMA.head
    folder = Path(toque.monitor.ledger.__file__).parent / "migrations"
    assert ScriptDirectory(str(folder)).get_current_head() == SCHEMA.head


def test_a_ledger_from_before_the_hours_of_keys_gets_them(database: Database) -> None:
    maker = Maker(11, days=3)
    first, later = ([maker.closed() for _ in range(60)] for _ in range(2))
    database.apply(first)
    with database.write() as connection:  # as version 0001 left it
        connection.exec_driver_sql("DROP TABLE usage_key_hour")
        connection.exec_driver_sql("UPDATE ledger_version SET version_num = '0001'")
    again = Database(database.url)
    again.apply(later)
    rows = +stored(again, KEY_HOURS.table.name, KEY_HOURS.groups)
    assert rows == +by_hand(first + later, 3_600, KEY_HOURS.groups)
    again.close()


def test_hours_of_keys_that_an_older_gateway_did_not_keep_are_mended(database: Database) -> None:
    maker = Maker(12, days=3)
    records = [maker.closed() for _ in range(120)]
    database.apply(records[:80])
    with database.write() as connection:
        kept = [tuple(row) for row in connection.exec_driver_sql("SELECT * FROM usage_key_hour")]
    database.apply(records[80:])
    with database.write() as connection:  # as if the last forty were an older gateway's
        connection.execute(delete(KEY_HOURS.table))
        connection.execute(insert(KEY_HOURS.table).values(kept))
    assert database.mend_key_hours(0)
    assert +stored(database, KEY_HOURS.table.name, KEY_HOURS.groups) == +by_hand(
        records, 3_600, KEY_HOURS.groups
    )
    assert not database.mend_key_hours(0)


def test_a_ledger_of_a_newer_toque_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    Database(url).close()
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE ledger_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StoreError, match="version 9999"):
        Database(url)


def test_the_fold_has_every_group_and_measure() -> None:
    (row,) = fold([Maker().closed()], 3_600)
    assert tuple(row) == ("bucket", *GROUPS, *MEASURES)


def test_a_value_that_fits_no_column_is_refused_as_such(database: Database) -> None:
    with pytest.raises(RejectedError):
        database.apply([Maker().closed(prompt_tokens=2**70)])
    database.apply([Maker(1).closed(model="m" * 5_000, client_id="a\0b")])
    (row,) = database.find("req-1-1")
    assert (len(row["model"]), row["client_id"]) == (256, "ab")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mysql://x/y", "sqlite:/// or postgresql"),
        ("nonsense", "not a database's URL"),
        ("oracle://x", "must be"),
    ],
)
def test_urls_that_are_none(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Database(url)


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"something else entirely, and long enough" * 50)
    with pytest.raises(StoreError, match="not a database"):
        Database(f"sqlite:///{tmp_path}/ledger.db")


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    """The first change of a file's journal is refused to all but one, without waiting; they try again."""
    errors: list[Exception] = []
    for number in range(15):
        start = threading.Barrier(4)

        def opened(url: str = f"sqlite:///{tmp_path}/{number}.db", start: threading.Barrier = start) -> None:
            try:
                start.wait()
                Database(url).close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=opened) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
