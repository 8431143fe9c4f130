"""Money adds up: prices, device time, budgets."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.errors import ConfigError
from toque.monitor.cost import (
    Budget,
    DeviceTime,
    Price,
    PriceList,
    currency_text,
    decide,
    device_cost,
    per_million,
    replica_time,
    strictest,
)

counts = st.integers(0, 10**6)
prices = st.decimals(0, 1000, places=3)


@given(prices, prices, st.none() | prices, counts, counts, counts)
def test_list_amounts_are_exact_for_prices_of_three_decimals(
    given_in: Decimal, given_out: Decimal, cached: Decimal | None, fresh: int, hits: int, out: int
) -> None:
    price = Price(given_in, given_out, cached)
    exact = (
        Fraction(given_in) * fresh
        + Fraction(given_in if cached is None else cached) * hits
        + Fraction(given_out) * out
    ) * 1000
    assert price.amount(fresh + hits, hits, out) == exact


def test_cached_tokens_are_cheaper_only_when_a_price_says_so() -> None:
    assert Price(Decimal(1), Decimal(2)).amount(10, 4, 3) == 16_000
    assert Price(Decimal(1), Decimal(2), Decimal("0.1")).amount(10, 4, 3) == 6_000 + 400 + 6_000


def test_a_tenant_may_have_its_own_price() -> None:
    own, usual = Price(Decimal(1)), Price(Decimal(2))
    listed = PriceList({"m": usual}, {("acme", "m"): own})
    assert listed.price("acme", "m") is own
    assert listed.price("bolt", "m") is usual
    assert listed.price("bolt", "other").amount(10**6, 0, 10**6) == 0


@pytest.mark.parametrize("bad", ["-1", "NaN", "Infinity", "1000001"])
def test_prices_out_of_bounds_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"per million tokens must be 0 to 1000000"):
        Price(output=Decimal(bad))


def test_what_an_hour_costs_is_what_it_costs() -> None:
    assert device_cost(3_600 * 10**9, Decimal("2.50")) == 2_500_000_000
    assert device_cost(36 * 10**9, Decimal("2.50")) == 25_000_000
    assert per_million(25_000_000, 50_000) == pytest.approx(0.5)
    assert per_million(5, 0) == 0.0


@given(*[st.integers(0, 10**15)] * 4)
def test_the_time_of_a_replica_is_all_accounted_for(up: int, load: int, steps: int, attributed: int) -> None:
    time = replica_time(up, load, steps, attributed)
    assert time.paid_ns == up
    assert min(time.load_ns, time.busy_ns, time.idle_ns, time.attributed_ns) >= 0
    assert time.attributed_ns <= time.busy_ns
    assert (time + time).paid_ns == 2 * up
    assert 0 <= time.utilisation <= 1


def test_an_empty_deployment_costs_nothing() -> None:
    assert DeviceTime().utilisation == 0.0
    assert DeviceTime().cost(Decimal(3)) == 0


@given(st.integers(-(10**20), 10**20))
def test_amounts_are_printed_with_all_their_digits(amount: int) -> None:
    assert Decimal(currency_text(amount)) * 10**9 == amount


def test_a_budget_warns_then_refuses_until_its_period_ends() -> None:
    budget = Budget(1_000, soft=0.8)
    assert decide(799, budget, 60).warning == ""
    warned = decide(800, budget, 60, "this tenant")
    assert (warned.allowed, warned.warning) == (True, "this tenant has spent 80% of its budget")
    refused = decide(1_000, budget, 90.5)
    assert (refused.allowed, refused.retry_after_s) == (False, 90.5)
    assert decide(10**12, None, 1).allowed
    assert not decide(0, Budget(0), 1).allowed
    assert strictest([warned, refused]) is refused
    assert strictest([warned, decide(0, None, 1), warned]).warning.count("80%") == 2


def test_budgets_out_of_bounds_are_refused() -> None:
    for wrong in ((-1, 0.5), (1, 0.0), (1, 1.5)):
        with pytest.raises(ConfigError):
            Budget(*wrong)
