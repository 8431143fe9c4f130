"""The ledger on `/metrics`: whether rows get where they belong, and money as it is earned and spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toque.monitor.cost import NANO, DeviceTime, replica_time
from toque.types import EngineStats

if TYPE_CHECKING:
    from toque.monitor.ledger.ledger import Ledger

STATES = ("ok", "buffering", "losing")


class LedgerCollector(Collector):
    """Reads the ledger when somebody scrapes. Labels are served models, tenants never: they would not be bounded."""

    def __init__(self, ledger: Ledger, currency: str) -> None:
        self._ledger = ledger
        self._currency = currency

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._ledger.status()
        state = GaugeMetricFamily(
            "toque_ledger_state", "1 for what the ledger does: ok, buffering, losing.", labels=("state",)
        )
        for name in STATES:
            state.add_metric((name,), float(status.state == name))
        yield state
        yield GaugeMetricFamily("toque_ledger_open_requests", "Rows that are open.", value=status.open)
        yield GaugeMetricFamily(
            "toque_ledger_journal_bytes", "What the journal holds on disk.", value=status.pending_bytes
        )
        yield CounterMetricFamily("toque_ledger_rows", "Rows that were closed.", value=status.written)
        lost = "Rows that found no room, or that the database refused."
        yield CounterMetricFamily("toque_ledger_rows_lost", lost, value=status.lost + status.rejected)
        labels = ("model", "currency")
        listed = CounterMetricFamily("toque_list_amount", "List price of what was used.", labels=labels)
        cost = CounterMetricFamily("toque_cost", "Real cost of the device time of requests.", labels=labels)
        device = CounterMetricFamily(
            "toque_request_device_seconds", "Device time attributed to requests.", labels=("model",)
        )
        for model, total in list(self._ledger.totals.items()):
            listed.add_metric((model, self._currency), total.list_nano / NANO)
            cost.add_metric((model, self._currency), total.cost_nano / NANO)
            device.add_metric((model,), total.device_ns / 1e9)
        yield from (listed, cost, device)


class PaidTime:
    """Where each deployment's replicas' time went, added up over their restarts (each begins to count from zero)."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._engines = engines
        self._last: dict[str, DeviceTime] = {}
        self._before: dict[str, DeviceTime] = {}

    def read(self) -> dict[str, DeviceTime]:
        found: dict[str, DeviceTime] = {}
        for model, stats in self._engines().items():
            time = replica_time(
                int(stats.up_seconds * 1e9),
                int(stats.load_seconds * 1e9),
                int(stats.step_seconds * 1e9),
                int(stats.device_seconds * 1e9),
            )
            last = self._last.get(model, DeviceTime())
            if time.paid_ns < last.paid_ns:
                self._before[model] = self._before.get(model, DeviceTime()) + last
            self._last[model] = time
            found[model] = self._before.get(model, DeviceTime()) + time
        return found


class PaidTimeCollector(Collector):
    """Load and idle time beside what requests carry: a deployment costs all of it."""

    def __init__(self, paid: PaidTime, hourly: Decimal, currency: str) -> None:
        self._paid = paid
        self._hourly = hourly
        self._currency = currency

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            "toque_replica_seconds", "Replicas' time: loading, busy, idle.", labels=("model", "kind")
        )
        cost = CounterMetricFamily(
            "toque_deployment_cost",
            "What the replicas of a model cost, with their idle and load time.",
            labels=("model", "currency"),
        )
        for model, time in self._paid.read().items():
            seconds.add_metric((model, "load"), time.load_ns / 1e9)
            seconds.add_metric((model, "busy"), time.busy_ns / 1e9)
            seconds.add_metric((model, "idle"), time.idle_ns / 1e9)
            cost.add_metric((model, self._currency), time.cost(self._hourly) / NANO)
        yield from (seconds, cost)
