"""Everything that a served gateway keeps of its requests, as the settings say: set up before it is ready, begun after.

What takes long to import or to open begins in `Monitoring.start`, which no cold start waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from toque.registry.home import default_home

if TYPE_CHECKING:
    from toque.config import Settings
    from toque.gateway.gateway import Gateway
    from toque.monitor.ledger.ledger import Ledger


@dataclass(slots=True)
class Monitoring:
    """`close` after the last answer has left, and before `Gateway.close`."""

    gateway: Gateway
    ledger: Ledger | None

    def start(self) -> None:
        """What the first requests need at once. `start_devices` may follow when they have been answered."""
        if self.ledger is not None:
            self.ledger.start()
        if self.gateway.answers is not None:
            self.gateway.answers.start()

    def start_devices(self) -> None:
        """Blocks for 25 ms, to import what asks the driver."""
        from toque.monitor.devices import DeviceCollector, nvml

        library = nvml()
        if library is not None:
            self.gateway.metrics.registry.register(DeviceCollector(library))

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()


def set_up(gateway: Gateway, settings: Settings) -> Monitoring:
    """StoreError when there is no place for the books, ConfigError for prices or a collector that cannot be."""
    _keep_answers(gateway, settings)
    _keep_events(gateway, settings)
    return Monitoring(gateway, _open_ledger(gateway, settings) if settings.ledger.enabled else None)


def _open_ledger(gateway: Gateway, settings: Settings) -> Ledger:
    from toque.monitor.ledger.ledger import Ledger
    from toque.monitor.ledger_metrics import LedgerCollector, PaidTime, PaidTimeCollector
    from toque.monitor.metering import pricing
    from toque.monitor.spend import Spend

    kept = settings.ledger
    hourly = kept.hourly.get("cpu", Decimal(0))
    ledger = Ledger(
        kept.place(default_home()),
        url=kept.url,
        price=pricing(kept.price_list(), hourly),
        spend=Spend(kept.tenant_budgets(), kept.budgets_of_keys()),
        retention=kept.retention(),
        max_bytes=kept.max_journal_mb * 2**20,
        on_died=None if gateway.event_log is None else gateway.event_log.died,
    )
    gateway.ledger = ledger
    registry = gateway.metrics.registry
    registry.register(LedgerCollector(ledger, kept.currency))
    registry.register(PaidTimeCollector(PaidTime(gateway.engine_stats), hourly, kept.currency))
    return ledger


def _keep_answers(gateway: Gateway, settings: Settings) -> None:
    """Let requests with an Idempotency-Key find their answers again. Nothing is opened before the first of them."""
    kept = settings.idempotency
    if kept.enabled:
        from toque.gateway.answer_store import AnswerStore

        gateway.answers = AnswerStore(
            settings.ledger.place(default_home()) / "answers.db",
            age_s=kept.hours * 3_600,
            max_bytes=kept.max_mb * 2**20,
        )


def _keep_events(gateway: Gateway, settings: Settings) -> None:
    """Let the lives of requests be told afterwards."""
    megabytes = settings.tracing.event_log_mb
    if megabytes:
        from toque.monitor.event_log import EventLog

        place = settings.ledger.place(default_home())
        gateway.event_log = EventLog(place, max_bytes=megabytes * 2**20)
    if settings.tracing.endpoint:
        from toque.monitor.span_sender import SpanSender

        gateway.spans = SpanSender(settings.tracing.endpoint)
