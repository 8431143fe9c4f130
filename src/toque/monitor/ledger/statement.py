"""A month's statement for the finance department: lines that add up, checked against the requests themselves."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import func, select

from toque.monitor.cost import NANO, currency_text
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.record import Outcome
from toque.monitor.ledger.tables import MEASURES, SUMMED, usage_event
from toque.monitor.ledger.usage import Usage, UsageQuery, iso, month_bounds, usage

_UNSOLD = ("failed", "refused", "lost")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Statement:
    """``usage`` has a row per tenant, key and model. ``kept`` is the number of the month's requests whose rows are
    still in the ledger; ``differs`` names the measures in which those rows, where all are there, add up to something
    else than the statement (that would be a fault of the ledger's)."""

    month: str
    usage: Usage
    kept: int
    differs: tuple[str, ...]
    final: bool  # the month is over

    @property
    def checked(self) -> bool:
        """Whether every request of the month was added up again."""
        return self.kept == self.usage.total["requests"] and not self.differs


def statement(
    database: Database, month: str, *, tenant: str | None = None, now: float | None = None
) -> Statement:
    """What a month is billed by. RequestError when ``month`` is none.

    Its lines add up to its total to the last billionth; they come from the sums by day, which stay for good.
    """
    since, until = month_bounds(month)
    where = {} if tenant is None else {"tenant": tenant}
    found = usage(database, UsageQuery(("tenant", "key", "model"), since, until, where))
    columns = [func.count(), *(func.coalesce(func.sum(usage_event.c[name]), 0) for name in SUMMED)]
    query = select(*columns).where(
        usage_event.c.closed_at >= since * 1_000_000,
        usage_event.c.closed_at < until * 1_000_000,
        usage_event.c.outcome != Outcome.OPEN.value,
    )
    if tenant is not None:
        query = query.where(usage_event.c.tenant == tenant)
    with database.read() as connection:
        kept, *sums = (int(number) for number in connection.execute(query).one())
    total = found.total
    differs: tuple[str, ...] = ()
    if kept >= total["requests"]:  # fewer: single requests are forgotten after a while
        again = dict(zip(("requests", *SUMMED), (kept, *sums), strict=True))
        differs = tuple(name for name, number in again.items() if number != total[name])
    return Statement(month, found, kept, differs, (time.time() if now is None else now) >= until)


def text(made: Statement, currency: str) -> Iterator[str]:
    """The statement on paper: a block per tenant with its subtotal, then the total, rounded once, at the end."""
    year, month = made.month.split("-")
    yield f"Statement of usage, {calendar.month_name[int(month)]} {year}"
    yield f"{iso(made.usage.since)} to {iso(made.usage.until)}, amounts in {currency}"
    if not made.final:
        yield "The month is not over: these are the figures so far."
    rows = made.usage.rows
    widths = [max([len(name), *(len(str(row[name])) for row in rows)]) for name in ("key", "model")]

    def line(key: str, model: str, row: Row | None) -> str:
        cells = _HEADS if row is None else _figures(row)
        return f"  {key:<{widths[0]}}  {model:<{widths[1]}}  " + "  ".join(
            f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)
        )

    for tenant, lines in groupby(rows, key=lambda row: row["tenant"]):
        own = list(lines)
        yield ""
        yield f"Tenant {tenant or '(none)'}"
        yield line("key", "model", None)
        yield from (line(row["key"] or "-", row["model"], row) for row in own)
        if len(own) > 1:
            yield line("", "subtotal", _sum(own))
    yield ""
    yield line("", "TOTAL", made.usage.total)
    amount = made.usage.total["list_nano"]
    yield f"To be charged: {currency} {_cents(amount)} ({currency_text(amount)} before rounding)"
    unsold = {name: made.usage.total[name] for name in _UNSOLD if made.usage.total[name]}
    if unsold:
        told = ", ".join(f"{number} {name}" for name, number in unsold.items())
        yield f"Not charged: {told}. Their tokens are in the lines above, their amounts are 0."
    yield _checked(made)


def _checked(made: Statement) -> str:
    requests = made.usage.total["requests"]
    if made.differs:
        return (
            f"DOES NOT ADD UP: the rows of the month's {made.kept} requests give another {', '.join(made.differs)} "
            "than the sums by day"
        )
    if made.checked:
        return f"Checked: the rows of all {requests} requests, added up one by one, give the same."
    return f"Not checked request by request: the rows of {requests - made.kept} of {requests} requests have expired."


_HEADS = ("requests", "prompt", "cached", "completion", "per million", "amount")
_WIDTHS = (10, 14, 14, 14, 12, 18)


def _figures(row: Row) -> list[str]:
    tokens = row["prompt_tokens"] + row["completion_tokens"]
    price = row["list_nano"] / NANO / tokens * 1e6 if tokens else 0.0
    counts = (row["requests"], row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    return [*(f"{number:,}" for number in counts), f"{price:.4f}", currency_text(row["list_nano"])]


def _sum(rows: Sequence[Row]) -> Row:
    return {name: sum(row[name] for row in rows) for name in MEASURES}


def _cents(nano: int) -> str:
    """Rounded half to even, as books are."""
    cents, rest = divmod(nano, NANO // 100)
    half = NANO // 200
    cents += rest > half or (rest == half and cents % 2 == 1)
    return f"{cents // 100:,}.{cents % 100:02d}"
