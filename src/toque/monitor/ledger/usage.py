"""Questions to the ledger: usage grouped in any way, as rows, CSV, or a month's statement."""

from __future__ import annotations

import calendar
import csv
import io
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, func, select

from toque.errors import RequestError
from toque.monitor.cost import currency_text, per_million
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.tables import DAYS, HOURS, KEY_HOURS, MEASURES, Rollup

# What usage may be grouped by, and the columns behind it.
DIMENSIONS = {
    "model": "model",
    "version": "version",
    "tenant": "tenant",
    "key": "key_id",
    "endpoint": "endpoint",
}
PERIODS = {"hour": 3_600, "day": 86_400}
MAX_ROWS = 100_000
_MONEY = ("list_nano", "cost_nano")


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """``by`` names dimensions, and at most one of ``hour`` and ``day``; bounds are seconds since the epoch, rounded
    outwards to whole hours. ``where`` keeps the rows whose dimension has this value. RequestError names what is wrong.
    """

    by: Sequence[str] = ("model",)
    since: int = 0
    until: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.by:
            if name not in DIMENSIONS and name not in PERIODS:
                known = ", ".join((*DIMENSIONS, *PERIODS))
                raise RequestError(f"usage is grouped by {known}; not by {name[:40]!r}", param="group_by")
        if len(set(self.by)) != len(self.by) or {"hour", "day"} <= set(self.by):
            raise RequestError(
                "usage is grouped by each dimension once, and by hour or by day", param="group_by"
            )
        for name in self.where:
            if name not in DIMENSIONS:
                raise RequestError(
                    f"usage is filtered by {', '.join(DIMENSIONS)}; not by {name[:40]!r}", param=name
                )
        if self.until is not None and self.until <= self.since:
            raise RequestError(f"until ({self.until}) must be after since ({self.since})", param="until")


@dataclass(frozen=True, slots=True)
class Usage:
    """``rows`` in the order of their groups, ``total`` their sum. Amounts in nano, times in micro- and nanoseconds."""

    by: tuple[str, ...]
    since: int
    until: int
    rows: list[dict[str, Any]]
    total: dict[str, Any]


def usage(database: Database, query: UsageQuery) -> Usage:
    """Answered from the sums by hour, or by day where whole days are asked for: quick however many rows there are."""
    now = int(time.time())
    since = query.since // 3_600 * 3_600
    until = -(-(now + 1 if query.until is None else query.until) // 3_600) * 3_600
    # Days are right, and fewer, where no bound cuts one and no hour is to be told.
    whole_days = since % 86_400 == 0 and (until % 86_400 == 0 or query.until is None)
    rollup = _smallest(query, whole_days)
    table, seconds = rollup.table, rollup.seconds
    groups: list[ColumnElement[Any]] = []
    for name in query.by:
        if name in DIMENSIONS:
            groups.append(table.c[DIMENSIONS[name]].label(name))
        else:
            bucket = (
                table.c.bucket
                if PERIODS[name] == seconds
                else table.c.bucket - table.c.bucket % PERIODS[name]
            )
            groups.append(bucket.label(name))
    sums = [func.sum(table.c[measure]).label(measure) for measure in MEASURES]
    statement = select(*groups, *sums).where(table.c.bucket >= since, table.c.bucket < until)
    for name, value in query.where.items():
        statement = statement.where(table.c[DIMENSIONS[name]] == value)
    if groups:
        statement = statement.group_by(*groups).order_by(*groups)
    with database.read() as connection:
        answer = connection.execute(statement.limit(MAX_ROWS + 1))
        names = tuple(answer.keys())
        found = [tuple(row) for row in answer]
    if len(found) > MAX_ROWS:
        raise RequestError(f"that is more than {MAX_ROWS} rows: ask for a shorter time or fewer dimensions")
    first = len(groups)
    found = [row for row in found if row[first] is not None]  # a sum of nothing
    if database.dialect == "postgresql":  # whose sums are decimals
        found = [(*row[:first], *map(int, row[first:])) for row in found]
    columns = list(zip(*found, strict=True))[first:] or [()] * len(MEASURES)
    total = dict(zip(MEASURES, map(sum, columns), strict=True))
    rows = [dict(zip(names, row, strict=True)) for row in found]
    return Usage(tuple(query.by), since, until, rows, total)


def _smallest(query: UsageQuery, whole_days: bool) -> Rollup:
    """The roll-up with the fewest rows that knows what is asked."""
    if whole_days and "hour" not in query.by:
        return DAYS
    asked = {DIMENSIONS[name] for name in (*query.by, *query.where) if name in DIMENSIONS}
    return KEY_HOURS if asked <= set(KEY_HOURS.groups) else HOURS


def public_row(row: Mapping[str, Any], currency: str) -> dict[str, Any]:
    """A row as the API and the CLI give it: money as decimal text, times in seconds, live prices per million."""
    shown = {name: value for name, value in row.items() if name not in MEASURES}
    for period in PERIODS:
        if period in shown:
            shown[period] = iso(shown[period])
    tokens = row["prompt_tokens"] + row["completion_tokens"]
    requests = max(1, row["requests"])
    shown |= {name: row[name] for name in MEASURES if not name.endswith(("_nano", "_us", "_ns"))}
    return shown | {
        "total_tokens": tokens,
        "device_seconds": row["device_ns"] / 1e9,
        "mean_queue_seconds": row["queue_us"] / requests / 1e6,
        "mean_total_seconds": row["total_us"] / requests / 1e6,
        "list_amount": currency_text(row["list_nano"]),
        "real_cost": currency_text(row["cost_nano"]),
        "list_per_million_tokens": round(per_million(row["list_nano"], tokens), 6),
        "cost_per_million_tokens": round(per_million(row["cost_nano"], tokens), 6),
        "currency": currency,
    }


def document(found: Usage, currency: str) -> dict[str, Any]:
    """The answer as JSON, for the API and the CLI."""
    return {
        "object": "usage",
        "since": iso(found.since),
        "until": iso(found.until),
        "group_by": list(found.by),
        "data": [public_row(row, currency) for row in found.rows],
        "total": public_row(found.total, currency),
    }


def to_csv(found: Usage, currency: str) -> str:
    """A header, a line per row, and a line ``TOTAL`` (its group columns empty after the first)."""
    total = {name: "TOTAL" if number == 0 else "" for number, name in enumerate(found.by)}
    lines = [public_row(row, currency) for row in found.rows]
    summed = public_row(found.total, currency)
    out = io.StringIO()
    columns = [*found.by, *summed]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in line.items()} for line in lines)
    writer.writerow({**summed, **total})
    return out.getvalue()


def month_bounds(month: str) -> tuple[int, int]:
    """The seconds in which a month such as ``2026-09`` begins and ends, UTC."""
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month) or month < "1970":
        raise RequestError(f"a month is given as YYYY-MM, got {month[:20]!r}", param="month")
    year, number = int(month[:4]), int(month[5:])
    begin = calendar.timegm((year, number, 1, 0, 0, 0))
    return begin, begin + calendar.monthrange(year, number)[1] * 86_400


def iso(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _plain(value: object) -> object:
    """A cell that no spreadsheet takes for a formula."""
    if (
        isinstance(value, str)
        and value[:1] in ("=", "+", "-", "@", "\t", "\r")
        and not _NUMBER.fullmatch(value)
    ):
        return "'" + value
    return value


_NUMBER = re.compile(r"-?\d+(\.\d+)?")
