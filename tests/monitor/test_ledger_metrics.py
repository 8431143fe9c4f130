"""What `/metrics` says of the ledger and of paid time."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from prometheus_client import CollectorRegistry

from toque.monitor.cost import DeviceTime
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome, UsageRecord
from toque.monitor.ledger_metrics import LedgerCollector, PaidTime, PaidTimeCollector
from toque.types import EngineStats

SECOND = 10**9


def price(record: UsageRecord) -> None:
    record.list_nano, record.cost_nano = 2 * SECOND, SECOND // 2


def test_the_ledger_says_how_it_is_and_what_came_in(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, price=price)
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, "EUR"))
    entry = ledger.open("a", endpoint="e", model="m")
    ledger.open("b", endpoint="e", model="m")
    entry.record.device_ns = 3 * SECOND
    entry.close(Outcome.OK, 200)
    value = registry.get_sample_value
    assert value("toque_ledger_state", {"state": "ok"}) == 1
    assert value("toque_ledger_state", {"state": "losing"}) == 0
    assert value("toque_ledger_open_requests") == 1
    assert value("toque_ledger_rows_total") == 1
    assert value("toque_ledger_rows_lost_total") == 0
    labels = {"model": "m", "currency": "EUR"}
    assert value("toque_list_amount_total", labels) == 2
    assert value("toque_cost_total", labels) == 0.5
    assert value("toque_request_device_seconds_total", {"model": "m"}) == 3
    ledger.close()


def test_paid_time_goes_on_over_restarts_and_costs_all_of_it() -> None:
    stats = {"m": EngineStats(up_seconds=100, load_seconds=10, step_seconds=30, device_seconds=25)}
    paid = PaidTime(lambda: stats)
    first = DeviceTime(10 * SECOND, 30 * SECOND, 60 * SECOND, 25 * SECOND)
    assert paid.read() == {"m": first}
    stats["m"] = EngineStats(up_seconds=5, load_seconds=5)
    assert paid.read() == {"m": first + DeviceTime(5 * SECOND)}
    registry = CollectorRegistry()
    registry.register(PaidTimeCollector(paid, Decimal(36), "USD"))
    assert registry.get_sample_value("toque_replica_seconds_total", {"model": "m", "kind": "idle"}) == 60
    cost = registry.get_sample_value("toque_deployment_cost_total", {"model": "m", "currency": "USD"})
    assert cost == 1.05
