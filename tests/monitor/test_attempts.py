"""What each replica did for a request is kept apart, and adds up to what the client is billed (BR-079)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from toque.monitor.cost import Price, PriceList
from toque.monitor.latency import Latencies
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.metering import Meter, pricing
from toque.monitor.metrics import Metrics
from toque.routing.base import RouteEvent, RouteKind


class Book:
    """An entry of a ledger that only remembers, as `Ledger.open` would give it."""

    def __init__(self) -> None:
        self.record = UsageRecord("cmpl-1", 1_000, tenant="acme", model="m")

    def close(self, outcome: Any, status: int, *, finish_reason: str = "", error_code: str = "") -> None:
        self.record.outcome, self.record.status = outcome.value, status
        pricing(PriceList({"m": Price(Decimal(1), Decimal(2))}), Decimal("3.6"))(self.record)


def metering() -> tuple[Meter, Book, Metrics]:
    book = Book()
    metrics = Metrics(lambda: {})
    return Meter(metrics, Latencies(), "m", 1.0, book), book, metrics  # type: ignore[arg-type]  # a ledger's entry


def route(kind: RouteKind, replica: str, epoch: int = 1, tokens: int = 0) -> RouteEvent:
    return RouteEvent(
        kind, 0.0, replica, epoch, tokens=tokens, reason="" if kind is RouteKind.ROUTED else "it died"
    )


def test_a_request_that_one_replica_answered_names_it_and_has_no_attempts() -> None:
    meter, book, _ = metering()
    meter.routed(0, RouteEvent(RouteKind.HELD, 0.0, reason="starting"))
    meter.routed(0, route(RouteKind.ROUTED, "a", 3))
    meter.prompt(5, 0)
    meter.tokens(2, 0.0, 2.0)
    meter.completed(3.0)
    assert book.record.replica == "a.3"
    assert book.record.attempts == []


def test_a_migrated_answer_is_billed_once_and_its_attempts_add_up() -> None:
    meter, book, metrics = metering()
    meter.routed(0, route(RouteKind.ROUTED, "a"))
    meter.computed(100)
    meter.prompt(10, 4)
    meter.tokens(3, 0.0, 2.0)
    meter.routed(0, route(RouteKind.MIGRATED, "b", tokens=3))
    meter.computed(50)
    meter.tokens(2, 0.1, 2.5)
    meter.finished("stop", 0, 5)
    meter.completed(3.0)
    row = book.record
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 5)
    assert row.list_nano == 10 * 1_000 + 5 * 2_000
    assert row.replica == "b.1"
    first, second = row.attempts
    assert (first.number, first.replica, first.outcome, first.error_code) == (1, "a.1", "moved", "migrated")
    assert (second.number, second.replica, second.outcome, second.error_code) == (2, "b.1", "ok", "")
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "device_ns", "cost_nano"):
        assert getattr(first, name) + getattr(second, name) == getattr(row, name), name
    assert metrics.series("m").generated_tokens == 5


def test_a_retry_after_which_nobody_answers_keeps_both_attempts_and_sells_nothing() -> None:
    meter, book, _ = metering()
    meter.routed(0, route(RouteKind.ROUTED, "a"))
    meter.routed(0, route(RouteKind.RETRIED, "a", 2))
    meter.ended(RuntimeError("gone"))
    row = book.record
    assert (row.outcome, row.list_nano) == ("failed", 0)
    assert [(a.replica, a.outcome, a.error_code) for a in row.attempts] == [
        ("a.1", "moved", "retried"),
        ("a.2", "failed", "internal_error"),
    ]


@pytest.mark.parametrize("winner", ["a", "b"])
def test_of_two_replicas_the_one_that_spoke_first_has_the_tokens(winner: str) -> None:
    meter, book, _ = metering()
    meter.routed(0, route(RouteKind.ROUTED, "a"))
    meter.routed(0, route(RouteKind.HEDGED, "b"))
    meter.routed(0, route(RouteKind.WON, winner))
    meter.prompt(5, 0)
    meter.tokens(3, 0.0, 2.0)
    meter.completed(3.0)
    assert book.record.replica == f"{winner}.1"
    assert {a.replica: (a.outcome, a.error_code, a.completion_tokens) for a in book.record.attempts} == {
        f"{winner}.1": ("ok", "", 3),
        f"{'b' if winner == 'a' else 'a'}.1": ("moved", "hedged", 0),
    }


def test_choices_on_several_replicas_are_attempts_of_one_request() -> None:
    meter, book, _ = metering()
    for choice, replica in enumerate("aba"):
        meter.routed(choice, route(RouteKind.ROUTED, replica))
        meter.tokens(choice + 1, 0.0, 2.0, choice)
    meter.completed(3.0)
    assert [(a.replica, a.completion_tokens, a.outcome) for a in book.record.attempts] == [
        ("a.1", 4, "ok"),
        ("b.1", 2, "ok"),
    ]
