"""The ledger's database: SQLite in WAL mode, or PostgreSQL by URL."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    Engine,
    String,
    Table,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)

from toque.errors import ConfigError, StoreError
from toque.monitor.ledger.record import Attempt, Outcome, UsageRecord
from toque.monitor.ledger.rollup import fold
from toque.monitor.ledger.tables import GROUPS, MEASURES, ROLLUPS, usage_attempt, usage_event

HEAD = "0001"  # the newest migration; a test holds it to the migrations folder
VERSION_TABLE = "ledger_version"
BUSY_S = 15.0
_EVENT_COLUMNS = tuple(column.name for column in usage_event.columns)
_TEXTS = tuple((c.name, c.type.length or 0) for c in usage_event.columns if isinstance(c.type, String))
_migrating = threading.Lock()  # Alembic keeps the running migration's context in a global


class RejectedError(StoreError):
    """The database is there, but will not take this record, now or later."""


class Database:
    """Reads and writes usage. Everything raises StoreError, naming the database, when it cannot be reached.

    One process writes at a time in SQLite (others wait up to 15 s); any number may read meanwhile. Guarantee: a
    record is in the tables and in the roll-ups, or in neither; applying it again changes nothing.
    """

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date."""
        self.url, self._engine = _create(url)
        self._writing = self._engine.execution_options(toque_write=True)
        try:
            with _reported(self.url):
                if migrate:
                    self._migrate()
        except StoreError:
            self._engine.dispose()
            raise

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with _reported(self.url), self._engine.connect() as connection:
            yield connection

    def apply(self, records: Sequence[UsageRecord]) -> int:
        """Write records, in order, in one transaction; the number of requests closed by them for the first time.

        A closed row stays as it is; an open one is overwritten. Only rows that this call closes go into the roll-ups.
        """
        latest: dict[str, UsageRecord] = {}
        for record in records:
            known = latest.get(record.request_id)
            if known is None or not known.closed:
                latest[record.request_id] = record
        if not latest:
            return 0
        with _reported(self.url), self._writing.begin() as connection:
            closed_before = _closed(connection, list(latest))
            new = [record for record in latest.values() if record.request_id not in closed_before]
            closing = [record for record in new if record.closed]
            if new:
                connection.execute(self._upsert, [_row(record) for record in new])
            attempts = [_attempt(r.request_id, attempt) for r in closing for attempt in r.attempts]
            if attempts:
                connection.execute(self._insert(usage_attempt).on_conflict_do_nothing(), attempts)
            for seconds, table in ROLLUPS.items():
                rows = fold(closing, seconds)
                if rows:
                    connection.execute(self._add_up(table), rows)
        return len(closing)

    def orphans(self, gateway: str, current: str, limit: int = 1_000) -> list[UsageRecord]:
        """Open rows of earlier processes of this gateway: nobody will close them any more."""
        query = (
            select(usage_event)
            .where(usage_event.c.outcome == Outcome.OPEN.value)
            .where(usage_event.c.gateway.startswith(f"{gateway}.", autoescape=True))
            .where(usage_event.c.gateway != current)
            .limit(limit)
        )
        with self.read() as connection:
            return [UsageRecord(**row) for row in _rows(connection, query)]

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """The rows of a request, by its own id or the id that its client sent, with their attempts."""
        own = usage_event.c.request_id == request_id
        query = select(usage_event).where(own | (usage_event.c.client_id == request_id)).limit(100)
        with self.read() as connection:
            found = _rows(connection, query.order_by(usage_event.c.opened_at))
            for row in found:
                tries = select(usage_attempt).where(usage_attempt.c.request_id == row["request_id"])
                row["attempts"] = _rows(connection, tries.order_by(usage_attempt.c.number))
            return found

    def spent(self, since: int, process: str) -> dict[tuple[str, str], int]:
        """List amounts since a UTC midnight by tenant and key, without the rows that ``process`` wrote."""
        day, event = ROLLUPS[86_400], usage_event
        everyone = select(day.c.tenant, day.c.key_id, func.sum(day.c.list_nano)).where(day.c.bucket >= since)
        own = select(event.c.tenant, event.c.key_id, func.sum(event.c.list_nano)).where(
            event.c.closed_at >= since * 1_000_000,
            event.c.gateway == process,
            event.c.outcome != Outcome.OPEN.value,
        )
        with self.read() as connection:  # one transaction: both see the same rows
            rows = connection.execute(everyone.group_by(day.c.tenant, day.c.key_id))
            sums = {(tenant, key): int(amount) for tenant, key, amount in rows}
            for tenant, key, amount in connection.execute(own.group_by(event.c.tenant, event.c.key_id)):
                sums[tenant, key] = sums.get((tenant, key), 0) - int(amount)
        return sums

    def expire(self, *, events_before: int, hours_before: int, limit: int = 5_000) -> int:
        """Remove raw rows closed before ``events_before`` and hours before ``hours_before`` (seconds since the
        epoch), at most ``limit`` of each; the number removed. Days stay for good."""
        cut = events_before * 1_000_000
        old = select(usage_event.c.request_id).where(
            usage_event.c.closed_at < cut, usage_event.c.outcome != Outcome.OPEN.value
        )
        hours = ROLLUPS[3_600]
        with _reported(self.url), self._writing.begin() as connection:
            ids = [row[0] for row in connection.execute(old.limit(limit))]
            for part in _parts(ids):
                connection.execute(delete(usage_attempt).where(usage_attempt.c.request_id.in_(part)))
                connection.execute(delete(usage_event).where(usage_event.c.request_id.in_(part)))
            removed = connection.execute(delete(hours).where(hours.c.bucket < hours_before)).rowcount
        return len(ids) + removed

    def rebuild(self) -> None:
        """Add up the roll-ups anew from the raw rows that there are. For repairs, and for tests."""
        with _reported(self.url), self._writing.begin() as connection:
            for seconds, table in ROLLUPS.items():
                connection.execute(delete(table))
                closed = select(usage_event).where(usage_event.c.outcome != Outcome.OPEN.value)
                rows = fold((UsageRecord(**row) for row in _rows(connection, closed)), seconds)
                if rows:
                    connection.execute(self._add_up(table), rows)

    def close(self) -> None:
        self._engine.dispose()

    def _insert(self, table: Table) -> Any:
        return (postgresql.insert if self.dialect == "postgresql" else sqlite.insert)(table)

    @property
    def _upsert(self) -> Any:
        statement = self._insert(usage_event)
        changes = {name: statement.excluded[name] for name in _EVENT_COLUMNS if name != "request_id"}
        return statement.on_conflict_do_update(
            index_elements=["request_id"], set_=changes, where=usage_event.c.outcome == Outcome.OPEN.value
        )

    def _add_up(self, table: Table) -> Any:
        statement = self._insert(table)
        sums = {name: table.c[name] + statement.excluded[name] for name in MEASURES}
        return statement.on_conflict_do_update(index_elements=["bucket", *GROUPS], set_=sums)

    def _migrate(self) -> None:
        """Up to `HEAD`. A database that is there already costs one query, and Alembic is not even imported."""
        with self._engine.connect() as connection:
            if inspect(connection).has_table(VERSION_TABLE):
                version = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
                if version == HEAD:
                    return
                if version is not None and version > HEAD:
                    raise StoreError(
                        f"the ledger {self.url} is of version {version}; this Toque knows up to {HEAD}: update Toque"
                    )
        from alembic import command
        from alembic.config import Config

        with _migrating, self._writing.begin() as connection:
            if self.dialect == "postgresql":  # several gateways may start at once
                connection.execute(select(func.pg_advisory_xact_lock(0x746F717565)))
            config = Config()
            folder = str(Path(__file__).parent / "migrations")
            config.set_main_option("script_location", folder.replace("%", "%%"))
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            config.attributes["version_table"] = VERSION_TABLE
            command.upgrade(config, "head")


def _create(url: str) -> tuple[str, Engine]:
    """The engine, and its URL as it may be shown."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        backend = parsed.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"ledger.url must be sqlite:/// or postgresql://, got {backend}://", param="ledger.url"
            )
        if backend == "postgresql":
            options: dict[str, Any] = {
                "pool_pre_ping": True,
                # A host that is gone, rather than slow, is noticed within half a minute.
                "connect_args": {"connect_timeout": 5, "keepalives_idle": 10, "tcp_user_timeout": 30_000},
            }
        else:
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            options = {"connect_args": {"timeout": BUSY_S, "check_same_thread": False}}
        engine = create_engine(parsed, **options)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"ledger.url is not a database's URL: {error}", param="ledger.url") from None
    except ModuleNotFoundError:
        raise ConfigError(
            "a PostgreSQL ledger needs the driver: pip install 'toque[postgres]'", param="ledger.url"
        ) from None
    except OSError as error:
        raise StoreError(f"the ledger's folder cannot be made: {error}") from None
    if backend == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return parsed.render_as_string(hide_password=True), engine


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are begun here, not guessed by the driver
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")  # the journal is what survives a power cut
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer would be refused at once where another process has written meanwhile.
    writes = connection.get_execution_options().get("toque_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _reported(url: str) -> Iterator[None]:
    try:
        yield
    except (DataError, IntegrityError, OverflowError) as error:
        raise RejectedError(f"the ledger {url} refuses a record: {_brief(error)}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"the ledger {url} cannot be used: {_brief(error)}") from error
    except OSError as error:
        raise StoreError(f"the ledger {url} cannot be used: {error}") from error


def _brief(error: Exception) -> str:
    reason = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(reason).split())[:300]


def _closed(connection: Connection, ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for part in _parts(ids):
        query = select(usage_event.c.request_id).where(
            usage_event.c.request_id.in_(part), usage_event.c.outcome != Outcome.OPEN.value
        )
        found.update(row[0] for row in connection.execute(query))
    return found


def _parts(ids: Sequence[str], size: int = 500) -> Iterable[list[str]]:
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])


def _rows(connection: Connection, query: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _row(record: UsageRecord) -> Mapping[str, Any]:
    row = {name: getattr(record, name) for name in _EVENT_COLUMNS}
    for name, length in _TEXTS:
        if len(row[name]) > length or "\0" in row[name]:
            row[name] = row[name].replace("\0", "")[:length]
    return row


def _attempt(request_id: str, attempt: Attempt) -> Mapping[str, Any]:
    return {"request_id": request_id, **msgspec.structs.asdict(attempt)}
