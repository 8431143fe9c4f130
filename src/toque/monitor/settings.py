"""What the ledger may be told: where it is, how long it remembers, prices and budgets.

Reading the settings stands before everything else in a cold start, so what they lead to is imported when it is made.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field

if TYPE_CHECKING:
    from toque.monitor.cost import Budget, Price, PriceList
    from toque.monitor.ledger.applier import Retention


class PriceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Currency per million tokens."""

    input: Decimal = Decimal(0)
    output: Decimal = Decimal(0)
    cached_input: Decimal | None = None


class BudgetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Currency per calendar month (UTC); from the ``soft`` part of it on, answers carry a warning."""

    monthly: Decimal
    soft: Annotated[float, Meta(gt=0, le=1)] = 0.8

    def __post_init__(self) -> None:
        if not self.monthly.is_finite() or self.monthly < 0:
            raise ValueError(f"monthly must be 0 or more, got {self.monthly}")


class TracingSettings(Struct, frozen=True):
    """How requests' lives are told: on disk, for `toque logs`, and as spans to an OpenTelemetry collector.

    ``endpoint`` is the collector's OTLP/HTTP address, such as http://localhost:4318; "": no spans.
    """

    event_log_mb: Annotated[int, Meta(ge=0, le=100_000)] = 64  # 0: none
    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of requests whose client has not decided


class LedgerSettings(Struct, frozen=True):
    """One row per request, priced. ``url`` is SQLAlchemy's; "" is SQLite in ``folder`` (default TOQUE_HOME/ledger)."""

    enabled: bool = True
    folder: str = ""
    url: str = ""
    events_days: Annotated[int, Meta(ge=1, le=36_500)] = 90
    hours_days: Annotated[int, Meta(ge=1, le=36_500)] = 400
    max_journal_mb: Annotated[int, Meta(ge=16, le=1_000_000)] = 256
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"
    prices: dict[str, PriceSettings] = field(default_factory=dict)  # by model
    tenant_prices: dict[str, dict[str, PriceSettings]] = field(default_factory=dict)  # by tenant and model
    hourly: dict[str, Decimal] = field(default_factory=dict)  # of a replica, by its kind: {"cpu": 0.12}
    budgets: dict[str, BudgetSettings] = field(default_factory=dict)  # by tenant
    key_budgets: dict[str, BudgetSettings] = field(default_factory=dict)  # by key id

    def place(self, home: Path) -> Path:
        return Path(self.folder).expanduser() if self.folder else home / "ledger"

    def database_url(self, home: Path) -> str:
        return self.url or f"sqlite:///{self.place(home) / 'ledger.db'}"

    def retention(self) -> Retention:
        from toque.monitor.ledger.applier import Retention

        return Retention(self.events_days, self.hours_days)

    def price_list(self) -> PriceList:
        """ConfigError names a price out of bounds."""
        from toque.monitor.cost import PriceList

        return PriceList(
            {model: _price(price) for model, price in self.prices.items()},
            {
                (tenant, model): _price(price)
                for tenant, models in self.tenant_prices.items()
                for model, price in models.items()
            },
            self.currency,
        )

    def tenant_budgets(self) -> dict[str, Budget]:
        return {name: _budget(budget) for name, budget in self.budgets.items()}

    def budgets_of_keys(self) -> dict[str, Budget]:
        return {name: _budget(budget) for name, budget in self.key_budgets.items()}


def _price(given: PriceSettings) -> Price:
    from toque.monitor.cost import Price

    return Price(given.input, given.output, given.cached_input)


def _budget(given: BudgetSettings) -> Budget:
    from toque.monitor.cost import NANO, Budget

    return Budget(int(given.monthly * NANO), given.soft)
