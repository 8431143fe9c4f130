"""The ledger's rows: written in batches, added up by hour and day, found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, String, delete, func, insert, select, text

from toque.monitor.ledger.record import Attempt, Outcome, UsageRecord
from toque.monitor.ledger.rollup import coarser, fold
from toque.monitor.ledger.tables import (
    DAYS,
    HOURS,
    KEY_HOURS,
    MEASURES,
    ROLLUPS,
    usage_attempt,
    usage_event,
)
from toque.sql import Schema, SqlDatabase

SCHEMA = Schema(
    "ledger",
    "ledger_version",
    Path(__file__).parent / "migrations",
    durable=False,  # the journal is what survives a power cut
)
_EVENT_COLUMNS = tuple(column.name for column in usage_event.columns)
_event_values = attrgetter(*_EVENT_COLUMNS)
_TEXTS = tuple((c.name, c.type.length or 0) for c in usage_event.columns if isinstance(c.type, String))


class Database(SqlDatabase):
    """Reads and writes usage. Everything raises StoreError, naming the database, when it cannot be reached.

    One process writes at a time in SQLite (others wait up to 15 s); any number may read meanwhile. Guarantee: a
    record is in the tables and in the roll-ups, or in neither; applying it again changes nothing.
    """

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date."""
        super().__init__(url, SCHEMA, migrate=migrate)

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
        with self.write() as connection:
            closed_before = _closed(connection, list(latest))
            new = [record for record in latest.values() if record.request_id not in closed_before]
            closing = [record for record in new if record.closed]
            if new:
                connection.execute(self._upsert, [_row(record) for record in new])
            attempts = [_attempt(r.request_id, attempt) for r in closing for attempt in r.attempts]
            if attempts:
                connection.execute(self._attempted, attempts)
            self._add_up(connection, closing)
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
        day, event = DAYS.table, usage_event
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
        with self.write() as connection:
            ids = [row[0] for row in connection.execute(old.limit(limit))]
            for part in _parts(ids):
                connection.execute(delete(usage_attempt).where(usage_attempt.c.request_id.in_(part)))
                connection.execute(delete(usage_event).where(usage_event.c.request_id.in_(part)))
            removed = len(ids)
            for hours in (rollup.table for rollup in ROLLUPS if rollup.seconds == HOURS.seconds):
                removed += connection.execute(delete(hours).where(hours.c.bucket < hours_before)).rowcount
        return removed

    def mend_key_hours(self, since: int) -> bool:
        """Make the sums of keys' hours from ``since`` on (seconds since the epoch) follow from the finest ones, where
        they do not: an older gateway that shared this ledger keeps none. True if there was something to mend."""
        finest, coarse = HOURS.table, KEY_HOURS.table
        requests = (
            select(func.coalesce(func.sum(table.c.requests), 0))
            .where(table.c.bucket >= since)
            .scalar_subquery()
            for table in (finest, coarse)
        )
        with self.read() as connection:
            here, there = connection.execute(select(*requests)).one()
        if int(here) == int(there):
            return False
        columns = ("bucket", *KEY_HOURS.groups)
        sums = (
            select(*(finest.c[name] for name in columns), *(func.sum(finest.c[name]) for name in MEASURES))
            .where(finest.c.bucket >= since)
            .group_by(*(finest.c[name] for name in columns))
        )
        with self.write() as connection:
            if self.dialect == "postgresql":
                connection.execute(text("LOCK TABLE usage_hour, usage_key_hour IN SHARE ROW EXCLUSIVE MODE"))
            connection.execute(delete(coarse).where(coarse.c.bucket >= since))
            connection.execute(insert(coarse).from_select([*columns, *MEASURES], sums))
        return True

    def rebuild(self) -> None:
        """Add up the roll-ups anew from the raw rows that there are. For repairs, and for tests."""
        with self.write() as connection:
            for rollup in ROLLUPS:
                connection.execute(delete(rollup.table))
            closed = select(usage_event).where(usage_event.c.outcome != Outcome.OPEN.value)
            self._add_up(connection, (UsageRecord(**row) for row in _rows(connection, closed)))

    def _add_up(self, connection: Connection, closed: Iterable[UsageRecord]) -> None:
        """Add records to every roll-up. The records are gone through once; the others follow from the finest."""
        finest = fold(closed, HOURS.seconds)
        for rollup in ROLLUPS if finest else ():
            rows = finest if rollup is HOURS else coarser(finest, rollup.seconds, rollup.groups)
            connection.execute(self._increase[rollup.table.name], rows)

    # Made once: to put such a statement together takes as long as to write thirty rows.

    @cached_property
    def _upsert(self) -> Any:
        statement = self.insert(usage_event)
        changes = {name: statement.excluded[name] for name in _EVENT_COLUMNS if name != "request_id"}
        return statement.on_conflict_do_update(
            index_elements=["request_id"], set_=changes, where=usage_event.c.outcome == Outcome.OPEN.value
        )

    @cached_property
    def _attempted(self) -> Any:
        return self.insert(usage_attempt).on_conflict_do_nothing()

    @cached_property
    def _increase(self) -> dict[str, Any]:
        """By the table of a roll-up."""
        found = {}
        for rollup in ROLLUPS:
            statement = self.insert(rollup.table)
            sums = {name: rollup.table.c[name] + statement.excluded[name] for name in MEASURES}
            found[rollup.table.name] = statement.on_conflict_do_update(
                index_elements=["bucket", *rollup.groups], set_=sums
            )
        return found


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
    row = dict(zip(_EVENT_COLUMNS, _event_values(record), strict=True))
    for name, length in _TEXTS:
        text = row[name]
        if len(text) > length or "\0" in text:
            row[name] = text.replace("\0", "")[:length]
    return row


def _attempt(request_id: str, attempt: Attempt) -> Mapping[str, Any]:
    return {"request_id": request_id, **msgspec.structs.asdict(attempt)}
