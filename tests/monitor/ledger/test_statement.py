"""A month's statement: it adds up, says whether it was checked, and does not hide where it is wrong."""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from toque.monitor.ledger.database import Database
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.ledger.statement import Statement, _cents, statement, text

from .rows import Maker

JULY = calendar.timegm((2026, 7, 1, 0, 0, 0))


def row(number: int, at: int, tenant: str = "acme", **fields: object) -> UsageRecord:
    made = UsageRecord(f"r{number}", (at - 1) * 1_000_000, at * 1_000_000, "ok", 200)
    made.tenant, made.key_id, made.model = tenant, "k1", "m"
    made.prompt_tokens, made.completion_tokens, made.list_nano = 1_000, 500, 1_234_567
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    database.apply(
        [
            row(1, JULY),
            row(2, JULY + 31 * 86_400 - 1, key_id="k2"),
            row(3, JULY + 86_400, tenant="globex", list_nano=5_000_000_000),
            row(4, JULY + 86_400, outcome="failed", status=500, list_nano=0),
            row(5, JULY - 1),
            row(6, JULY + 31 * 86_400),
            row(7, JULY + 5, outcome="open", closed_at=0),
        ]
    )
    yield database
    database.close()


def lines(made: Statement) -> str:
    return "\n".join(text(made, "EUR"))


def test_a_statement_has_blocks_subtotals_and_a_total_that_is_their_sum(ledger: Database) -> None:
    made = statement(ledger, "2026-07")
    told = lines(made)
    assert made.checked
    assert made.final
    assert "Tenant acme" in told
    assert "Tenant globex" in told
    assert told.count("subtotal") == 1  # a tenant of one line needs none
    amounts = [Decimal(a) for a in re.findall(r"^  k\d .* (\d+\.\d{9})$", told, re.MULTILINE)]
    (total,) = re.findall(r"TOTAL .* (\d+\.\d{9})$", told, re.MULTILINE)
    assert sum(amounts) == Decimal(total) == Decimal("5.002469134")
    assert "To be charged: EUR 5.00 (5.002469134 before rounding)" in told
    assert "Not charged: 1 failed" in told
    assert "Checked: the rows of all 4 requests" in told


def test_one_tenants_statement_is_its_part(ledger: Database) -> None:
    parts = [statement(ledger, "2026-07", tenant=name) for name in ("acme", "globex")]
    whole = statement(ledger, "2026-07")
    assert all(part.checked for part in parts)
    for name in ("list_nano", "requests", "prompt_tokens"):
        assert sum(part.usage.total[name] for part in parts) == whole.usage.total[name]


def test_what_has_expired_is_billed_all_the_same_and_the_statement_says_so(ledger: Database) -> None:
    before = statement(ledger, "2026-07").usage.total
    ledger.expire(events_before=JULY + 2 * 86_400, hours_before=0)
    made = statement(ledger, "2026-07")
    assert made.usage.total == before
    assert not made.checked
    assert made.differs == ()
    assert "3 of 4 requests have expired" in lines(made)


def test_a_ledger_that_was_tampered_with_does_not_pass(ledger: Database) -> None:
    with ledger.write() as connection:
        connection.exec_driver_sql("UPDATE usage_event SET completion_tokens = 7 WHERE request_id = 'r1'")
    made = statement(ledger, "2026-07")
    assert made.differs == ("completion_tokens",)
    assert not made.checked
    assert "DOES NOT ADD UP" in lines(made)


def test_a_month_that_runs_says_so_and_an_empty_one_is_nothing(ledger: Database) -> None:
    running = statement(ledger, "2026-07", now=JULY + 86_400 * 10)
    assert not running.final
    assert "not over" in lines(running)
    empty = statement(ledger, "2020-01")
    assert empty.checked
    assert "To be charged: EUR 0.00 (0.000000000 before rounding)" in lines(empty)


def test_random_months_are_checked(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/random.db")
    maker = Maker(11, days=40)
    database.apply([maker.closed() for _ in range(400)])
    for month in ("2026-09", "2026-10"):
        made = statement(database, month)
        assert made.checked
        assert made.usage.total["requests"] > 0
    database.close()


@pytest.mark.parametrize(
    ("nano", "cents"),
    [(0, "0.00"), (4_999_999, "0.00"), (5_000_000, "0.00"), (5_000_001, "0.01"), (15_000_000, "0.02"),
     (1_234_567_890_000_000, "1,234,567.89")],
)  # fmt: skip
def test_amounts_are_rounded_once_half_to_even(nano: int, cents: str) -> None:
    assert _cents(nano) == cents
