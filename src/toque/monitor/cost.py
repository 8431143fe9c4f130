"""Money: what a request is sold for, what it really cost, and whether its caller may spend more. Pure functions.

Amounts are whole billionths of the currency ("nano"), device time whole nanoseconds. A price of 0.001 per million
tokens is exactly one nano per token, so list amounts have no rounding for prices with up to three decimals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal

from toque.errors import ConfigError

NANO = 10**9
MILLION = 10**6
HOUR_NS = 3_600 * 10**9


@dataclass(frozen=True, slots=True)
class Price:
    """List prices in the currency per million tokens. ``cached_input`` defaults to the price of input."""

    input: Decimal = Decimal(0)
    output: Decimal = Decimal(0)
    cached_input: Decimal | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and not (value.is_finite() and 0 <= value <= 1_000_000):
                raise ConfigError(
                    f"the price of {name} per million tokens must be 0 to 1000000, got {value}", param=name
                )

    def amount(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The list price in nano; one rounding, to even. Cached tokens are a part of the prompt's."""
        cached_price = self.input if self.cached_input is None else self.cached_input
        total = (
            self.input * (prompt_tokens - cached_tokens)
            + cached_price * cached_tokens
            + self.output * completion_tokens
        )
        return int((total * (NANO // MILLION)).to_integral_value(ROUND_HALF_EVEN))


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices by model, and by tenant and model where a tenant has its own. What has no price costs nothing."""

    models: Mapping[str, Price] = field(default_factory=dict)
    tenants: Mapping[tuple[str, str], Price] = field(default_factory=dict)
    currency: str = "USD"

    def price(self, tenant: str, model: str) -> Price:
        own = self.tenants.get((tenant, model))
        return own if own is not None else self.models.get(model, _FREE)


_FREE = Price()


def device_cost(device_ns: int, hourly: Decimal) -> int:
    """What so much time of a replica costs, in nano, at a price per hour."""
    return int((hourly * NANO * device_ns / HOUR_NS).to_integral_value(ROUND_HALF_EVEN))


def per_million(amount_nano: int, tokens: int) -> float:
    """Currency per million tokens; 0 when there was none."""
    return amount_nano / NANO / tokens * MILLION if tokens > 0 else 0.0


def currency_text(amount_nano: int) -> str:
    """An amount with all its nine decimals, as statements print it: "12.345678900"."""
    sign = "-" if amount_nano < 0 else ""
    whole, fraction = divmod(abs(amount_nano), NANO)
    return f"{sign}{whole}.{fraction:09d}"


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Where a deployment's paid time went, in nanoseconds: ``load + busy + idle`` is the time its replicas were up.

    ``busy`` is what steps took, ``attributed`` the part of it that requests carry (a step's work for a request that
    ended without an answer stays with the deployment).
    """

    load_ns: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    attributed_ns: int = 0

    def __add__(self, other: DeviceTime) -> DeviceTime:
        return DeviceTime(
            self.load_ns + other.load_ns,
            self.busy_ns + other.busy_ns,
            self.idle_ns + other.idle_ns,
            self.attributed_ns + other.attributed_ns,
        )

    @property
    def paid_ns(self) -> int:
        return self.load_ns + self.busy_ns + self.idle_ns

    @property
    def utilisation(self) -> float:
        return self.busy_ns / self.paid_ns if self.paid_ns else 0.0

    def cost(self, hourly: Decimal) -> int:
        """All of it, in nano: requests pay for their part, the rest is what idling and loading cost."""
        return device_cost(self.paid_ns, hourly)


def replica_time(up_ns: int, load_ns: int, step_ns: int, attributed_ns: int) -> DeviceTime:
    """One replica's time. Whatever was neither loading nor stepping was idle."""
    load = min(load_ns, up_ns)
    busy = min(step_ns, up_ns - load)
    return DeviceTime(load, busy, up_ns - load - busy, min(attributed_ns, busy))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a key or a tenant may spend in a period (a calendar month, UTC). ``soft`` is a part of the limit."""

    limit_nano: int
    soft: float = 0.8

    def __post_init__(self) -> None:
        if self.limit_nano < 0:
            raise ConfigError(f"a budget must not be negative, got {self.limit_nano}", param="budget")
        if not 0.0 < self.soft <= 1.0:
            raise ConfigError(
                f"a budget's soft part must be above 0 and at most 1, got {self.soft:g}", param="soft"
            )


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """``allowed`` False is a 429 with ``retry_after_s``; ``warning`` is the value of a header, "" for none."""

    allowed: bool
    warning: str = ""
    retry_after_s: float = 0.0


def decide(
    spent_nano: int, budget: Budget | None, seconds_left: float, whose: str = "this key"
) -> BudgetDecision:
    """Whether a request may begin when so much is spent. The request that crosses the limit is still answered: what
    an answer costs is known only at its end."""
    if budget is None:
        return BudgetDecision(True)
    if spent_nano >= budget.limit_nano:
        return BudgetDecision(False, f"{whose} has spent its budget", max(1.0, seconds_left))
    if spent_nano >= budget.limit_nano * budget.soft:
        part = 100 * spent_nano // budget.limit_nano
        return BudgetDecision(True, f"{whose} has spent {part}% of its budget")
    return BudgetDecision(True)


def strictest(decisions: Sequence[BudgetDecision]) -> BudgetDecision:
    """Of several budgets that a request falls under: any refusal refuses, and warnings are joined."""
    refused = [decision for decision in decisions if not decision.allowed]
    if refused:
        return max(refused, key=lambda decision: decision.retry_after_s)
    return BudgetDecision(True, "; ".join(decision.warning for decision in decisions if decision.warning))
