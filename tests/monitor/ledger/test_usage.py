"""Usage by any dimension and time is what a plain loop over the rows makes of it; statements add up."""

from __future__ import annotations

import csv
import io
import itertools
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from toque.errors import RequestError
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.ledger.statement import statement
from toque.monitor.ledger.tables import MEASURES
from toque.monitor.ledger.usage import (
    DIMENSIONS,
    PERIODS,
    UsageQuery,
    month_bounds,
    public_row,
    to_csv,
    usage,
)

from .rows import START, Maker


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, list[UsageRecord]]]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('usage')}/ledger.db")
    maker = Maker(3, days=40)
    records = [maker.closed() for _ in range(600)]
    database.apply(records)
    yield database, records
    database.close()


def value(record: UsageRecord, measure: str) -> int:
    if measure == "requests":
        return 1
    if measure in ("ok", "cancelled", "failed", "refused", "lost"):
        return int(record.outcome == measure)
    return int(getattr(record, measure))


def slowly(records: list[UsageRecord], by: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, int]]:
    groups: dict[tuple[Any, ...], dict[str, int]] = defaultdict(lambda: dict.fromkeys(MEASURES, 0))
    for record in records:
        seconds = record.closed_at // 1_000_000
        key = tuple(
            seconds // PERIODS[name] * PERIODS[name] if name in PERIODS else getattr(record, DIMENSIONS[name])
            for name in by
        )
        for measure in MEASURES:
            groups[key][measure] += value(record, measure)
    return groups


GROUPINGS = [
    (),
    *[(name,) for name in (*DIMENSIONS, *PERIODS)],
    *itertools.permutations(("tenant", "day", "model"), 2),
    ("hour", "key"),
    ("tenant", "hour"),
    ("hour", "tenant", "key"),
    ("hour", "key", "model"),
    ("tenant", "key", "model", "version", "endpoint", "day"),
]


@pytest.mark.parametrize("by", GROUPINGS, ids=lambda by: "+".join(by) or "all")
@pytest.mark.parametrize("bounds", [(0, None), (86_400 * 2, 86_400 * 20), (3_600 * 7, 3_600 * 50)], ids=str)
def test_usage_is_what_a_loop_over_the_rows_says(
    filled: tuple[Database, list[UsageRecord]], by: tuple[str, ...], bounds: tuple[int, int | None]
) -> None:
    database, records = filled
    midnight = START // 86_400 * 86_400
    since = midnight + bounds[0] if bounds[1] else 0
    until = midnight + bounds[1] if bounds[1] else START + 100 * 86_400
    within = [r for r in records if since <= r.closed_at // 1_000_000 < until]
    found = usage(database, UsageQuery(by, since, until))
    expected = slowly(within, by)
    assert {tuple(row[name] for name in by): {m: row[m] for m in MEASURES} for row in found.rows} == expected
    assert found.total["requests"] == len(within) > 0
    keys = [tuple(row[name] for name in by) for row in found.rows]
    assert keys == sorted(keys)


def test_filters_keep_what_they_name(filled: tuple[Database, list[UsageRecord]]) -> None:
    database, records = filled
    query = UsageQuery(("model",), 0, START + 10**8, {"tenant": "acme", "key": "k1"})
    mine = [r for r in records if r.tenant == "acme" and r.key_id == "k1"]
    assert usage(database, query).total["completion_tokens"] == sum(r.completion_tokens for r in mine)
    for where, rows in (
        ({"key": "k1"}, [r for r in records if r.key_id == "k1"]),
        ({"model": mine[0].model}, [r for r in records if r.model == mine[0].model]),
    ):  # by hour and key: from the hours of keys, and from those of everything
        found = usage(database, UsageQuery(("hour", "key"), 0, START + 10**8, where))
        assert found.total["cost_nano"] == sum(r.cost_nano for r in rows)
        assert {(row["hour"], row["key"]): row["requests"] for row in found.rows} == {
            group: sums["requests"] for group, sums in slowly(rows, ("hour", "key")).items()
        }


@pytest.mark.parametrize("month", ["2026-09", "2026-10"])
def test_a_months_statement_adds_up_to_the_last_digit(
    filled: tuple[Database, list[UsageRecord]], month: str
) -> None:
    database, records = filled
    since, until = month_bounds(month)
    rows = [r for r in records if since * 10**6 <= r.closed_at < until * 10**6]
    found = statement(database, month).usage
    lines = list(csv.DictReader(io.StringIO(to_csv(found, "EUR"))))
    total = lines.pop()
    assert total["tenant"] == "TOTAL"
    assert len(lines) == len(slowly(rows, ("tenant", "key", "model")))
    for column, measure in (("list_amount", "list_nano"), ("real_cost", "cost_nano")):
        assert sum(Decimal(line[column]) for line in lines) == Decimal(total[column])
        assert Decimal(total[column]) * 10**9 == sum(getattr(r, measure) for r in rows)
    for column in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(int(line[column]) for line in lines) == int(total[column])
    assert int(total["requests"]) == len(rows) > 0
    acme = statement(database, month, tenant="acme").usage
    assert {row["tenant"] for row in acme.rows} == {"acme"}


def test_the_months_of_a_year_are_all_its_days() -> None:
    bounds = [month_bounds(f"2028-{month:02d}") for month in range(1, 13)]
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert (bounds[-1][1] - bounds[0][0]) == 366 * 86_400
    for wrong in ("2026-13", "2026-1", "september", "1969-12", ""):
        with pytest.raises(RequestError, match="YYYY-MM"):
            month_bounds(wrong)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"by": ("colour",)}, "group_by"),
        ({"by": ("model", "model")}, "group_by"),
        ({"by": ("hour", "day")}, "group_by"),
        ({"where": {"request_id": "x"}}, "request_id"),
        ({"since": 10, "until": 10}, "until"),
    ],
)
def test_questions_that_make_no_sense_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        UsageQuery(**fields)
    assert refused.value.param == param


def test_an_empty_ledger_has_no_usage(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    for by in ((), ("model",)):
        found = usage(database, UsageQuery(by))
        assert found.rows == []
        assert found.total["requests"] == 0
    assert public_row(found.total, "USD")["cost_per_million_tokens"] == 0
    assert to_csv(found, "USD").count("\n") == 2
    database.close()


def test_a_name_that_looks_like_a_formula_stays_a_name(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    database.apply([Maker().closed(model="=HYPERLINK(1)", tenant="-5")])
    line, _ = csv.DictReader(io.StringIO(to_csv(usage(database, UsageQuery(("model", "tenant"))), "USD")))
    assert (line["model"], line["tenant"]) == ("'=HYPERLINK(1)", "-5")
    database.close()
