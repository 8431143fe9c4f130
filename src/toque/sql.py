"""SQL databases: SQLite in WAL mode, or PostgreSQL by URL, with their migrations. What ledger and registry share.

A database's tables are made and changed by Alembic migrations in a folder of their own: `Schema` names it, and each
file ``versions/v0002_what.py`` is one step (``revision = "0002"``, ``down_revision = "0001"``, ``upgrade()``). They
are applied when a `SqlDatabase` opens; one that is up to date costs one query, and Alembic is not even imported.

SQLAlchemy takes a third of a second to import: nothing that stands before a server's readiness may import this file.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Table, create_engine, event, func, inspect, select, text
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

BUSY_S = 15.0  # how long a writer of SQLite waits for another
# A host that is gone, rather than slow, is noticed within half a minute; a URL may say otherwise.
_PATIENCE = {"connect_timeout": 5, "keepalives_idle": 10, "tcp_user_timeout": 30_000}
_migrating = threading.Lock()  # Alembic keeps the running migration's context in a global


class RejectedError(StoreError):
    """The database is there, but will not take this record, now or later."""


@dataclass(frozen=True, slots=True)
class Schema:
    """What a database holds. ``name`` is how messages call it, and the section of its ``url`` setting.

    ``durable``: a commit survives a power cut, at the price of a sync of the disk for each (SQLite only; PostgreSQL
    decides for itself).
    """

    name: str
    version_table: str
    migrations: Path
    durable: bool = True

    @property
    def head(self) -> str:
        """The newest migration's revision, read off the files' names."""
        return max(path.name[1:5] for path in (self.migrations / "versions").glob("v[0-9]*.py"))


class SqlDatabase:
    """An engine whose tables are up to date. Everything raises StoreError, naming the database, when it is away.

    One process writes at a time in SQLite (others wait up to 15 s); any number may read meanwhile.
    """

    def __init__(self, url: str, schema: Schema, *, migrate: bool = True) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date."""
        self.schema = schema
        self.url, self._engine = _create(url, schema)
        self._writing = self._engine.execution_options(toque_write=True)
        try:
            with self._reported():
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
        """A transaction that only reads."""
        with self._reported(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is committed when the block ends, and undone when it raises.

        In SQLite it is the only one that writes from its beginning on. RejectedError for a row that does not fit.
        """
        with self._reported(), self._writing.begin() as connection:
            yield connection

    def insert(self, table: Table) -> Any:
        """An INSERT of this dialect, which has ``on_conflict_do_update`` and ``on_conflict_do_nothing``."""
        return (postgresql.insert if self.dialect == "postgresql" else sqlite.insert)(table)

    def close(self) -> None:
        self._engine.dispose()

    def _migrate(self) -> None:
        table, head = self.schema.version_table, self.schema.head
        with self._engine.connect() as connection:
            if inspect(connection).has_table(table):
                version = connection.execute(text(f"SELECT version_num FROM {table}")).scalar()
                if version == head:
                    return
                if version is not None and version > head:
                    raise StoreError(
                        f"the {self.schema.name} {self.url} is of version {version}; this Toque knows up to {head}: "
                        "update Toque"
                    )
        from alembic import command
        from alembic.config import Config

        with _migrating, self._writing.begin() as connection:
            if self.dialect == "postgresql":  # several processes may start at once
                connection.execute(select(func.pg_advisory_xact_lock(0x746F717565)))
            config = Config()
            config.set_main_option("script_location", str(self.schema.migrations).replace("%", "%%"))
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            config.attributes["version_table"] = table
            command.upgrade(config, "head")

    @contextmanager
    def _reported(self) -> Iterator[None]:
        what = f"the {self.schema.name} {self.url}"
        try:
            yield
        except (DataError, IntegrityError, OverflowError) as error:
            raise RejectedError(f"{what} refuses a record: {_brief(error)}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"{what} cannot be used: {_brief(error)}") from error
        except OSError as error:
            raise StoreError(f"{what} cannot be used: {error}") from error


def run_migrations() -> None:
    """What a migrations folder's ``env.py`` does: there is no alembic.ini and no command line."""
    from alembic import context

    attributes = context.config.attributes
    context.configure(
        connection=attributes["connection"],
        version_table=attributes["version_table"],
        transaction_per_migration=False,
    )
    context.run_migrations()


def _create(url: str, schema: Schema) -> tuple[str, Engine]:
    """The engine, and its URL as it may be shown."""
    param = f"{schema.name}.url"
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        backend = parsed.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise ConfigError(f"{param} must be sqlite:/// or postgresql://, got {backend}://", param=param)
        if backend == "postgresql":
            options: dict[str, Any] = {
                "pool_pre_ping": True,
                "connect_args": {key: value for key, value in _PATIENCE.items() if key not in parsed.query},
            }
        else:
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            options = {"connect_args": {"timeout": BUSY_S, "check_same_thread": False}}
        engine = create_engine(parsed, json_deserializer=msgspec.json.decode, **options)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"{param} is not a database's URL: {error}", param=param) from None
    except ModuleNotFoundError:
        raise ConfigError(
            f"a PostgreSQL {schema.name} needs the driver: pip install 'toque[postgres]'", param=param
        ) from None
    except OSError as error:
        raise StoreError(f"the {schema.name}'s folder cannot be made: {error}") from None
    if backend == "sqlite":
        event.listen(engine, "connect", _set_up_durable if schema.durable else _set_up)
        event.listen(engine, "begin", _begin_sqlite)
    return parsed.render_as_string(hide_password=True), engine


def _set_up(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are begun here, not guessed by the driver
    cursor = connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _use_wal(cursor: Any) -> None:
    """Two who open a new file at once both want to change its journal: the second is refused without being made to
    wait, whatever its timeout says, so it waits here."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= until:
                raise
            time.sleep(0.01)


def _set_up_durable(connection: Any, record: object) -> None:
    _set_up(connection, record)
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer would be refused at once where another process has written meanwhile.
    writes = connection.get_execution_options().get("toque_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _brief(error: Exception) -> str:
    reason = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(reason).split())[:300]
