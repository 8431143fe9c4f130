"""What was spent in a month, by whoever closed it, and what follows from it."""

from __future__ import annotations

import calendar
import time
from collections import Counter
from pathlib import Path

from toque.monitor.cost import Budget
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome, UsageRecord
from toque.monitor.spend import Spend, month_of

from .ledger.rows import START, Maker

MAY = calendar.timegm((2026, 5, 20, 12, 0, 0))


def row(amount: int, tenant: str = "acme", key: str = "k1") -> UsageRecord:
    return UsageRecord("r", 0, tenant=tenant, key_id=key, list_nano=amount)


def test_both_what_was_read_and_what_was_closed_here_count() -> None:
    spend = Spend({"acme": Budget(1_000)}, {"k1": Budget(500)}, clock=lambda: MAY)
    begin, _ = month_of(MAY)
    spend.add(row(100))
    spend.add(row(50, key="k2"))
    spend.read(begin, {("acme", "k1"): 300, ("acme", "k3"): 5, ("bolt", "k9"): 10**9})
    assert spend.spent("tenant", "acme") == 455
    assert spend.spent("key", "k1") == 400
    assert spend.decide("acme", "k1").warning == "this key has spent 80% of its budget"
    assert spend.decide("bolt", "k9").allowed
    spend.add(row(100))
    refused = spend.decide("acme", "k1")
    assert not refused.allowed
    assert refused.retry_after_s == month_of(MAY)[1] - MAY
    assert spend.decide("acme", "k2").allowed
    spend.add(row(445, key="k2"))
    assert not spend.decide("acme", "k2").allowed


def test_a_new_month_begins_with_nothing_spent() -> None:
    clock = [float(MAY)]
    spend = Spend({"acme": Budget(100)}, clock=lambda: clock[0])
    may, june = month_of(MAY)
    spend.add(row(100))
    assert not spend.decide("acme", "k").allowed
    clock[0] = june
    assert spend.decide("acme", "k").allowed
    spend.read(may, {("acme", "k"): 10**6})  # a late answer about the old month
    assert spend.spent("tenant", "acme") == 0


def test_the_ledgers_sum_leaves_out_the_rows_of_this_process(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    maker = Maker(2, days=30)
    records = [maker.closed(gateway=maker.random.choice(["gw.1", "gw.2"])) for _ in range(300)]
    database.apply(records)
    since = START // 86_400 * 86_400 + 7 * 86_400
    expected: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record.gateway != "gw.2" and record.closed_at >= since * 10**6:
            expected[record.tenant, record.key_id] += record.list_nano
    assert +Counter(database.spent(since, "gw.2")) == +expected
    database.close()


def test_a_restarted_gateway_knows_what_was_spent_before(tmp_path: Path) -> None:
    def kept() -> Ledger:
        ledger = Ledger(
            tmp_path,
            price=lambda record: setattr(record, "list_nano", 60),
            spend=Spend({"acme": Budget(100)}),
            apply_s=0.02,
        )
        ledger.start()
        return ledger

    for spent in (0, 60, 120):
        ledger = kept()
        assert ledger.flush()
        until = time.monotonic() + 60
        while ledger.spend.spent("tenant", "acme") != spent:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert ledger.spend.decide("acme", "k").allowed == (spent < 100)
        ledger.open(f"r{spent}", endpoint="e", model="m", tenant="acme").close(Outcome.OK, 200)
        assert ledger.spend.spent("tenant", "acme") == spent + 60
        ledger.close()
