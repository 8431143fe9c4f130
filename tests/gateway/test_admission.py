"""The queue's arithmetic, against a plain count of what is inside."""

from __future__ import annotations

import contextlib
import random

import pytest

from toque.errors import QueueFullError
from toque.gateway.admission import Admission, Ticket, retry_after
from toque.types import EngineStats


def test_the_bounds_hold_and_everything_is_given_back() -> None:
    """Random arrivals, starts and ends; the totals are compared with a list of what is inside."""
    chance = random.Random(7)
    admission = Admission(max_requests=5, max_tokens=50)
    inside: list[tuple[Ticket, list[int]]] = []
    for _ in range(5000):
        action = chance.random()
        if action < 0.5:
            tokens = [chance.randint(1, 30)] * chance.randint(1, 3)
            try:
                inside.append((admission.enter(len(tokens), sum(tokens), EngineStats()), tokens))
            except QueueFullError:
                held = [t for _, many in inside for t in many]
                assert held
                assert len(held) + len(tokens) > 5 or sum(held) + sum(tokens) > 50
        elif inside and action < 0.8:
            ticket, tokens = chance.choice(inside)
            if tokens:
                ticket.started(tokens.pop())
        elif inside:
            ticket, _ = inside.pop(chance.randrange(len(inside)))
            ticket.release()
            ticket.release()
        held = [t for _, many in inside for t in many]
        assert (admission.requests, admission.tokens) == (len(held), sum(held))
    for ticket, _ in inside:
        ticket.release()
    assert (admission.requests, admission.tokens) == (0, 0)


def test_the_count_replaces_the_estimate() -> None:
    admission = Admission(10, 100)
    ticket = admission.enter(2, 10, EngineStats())
    ticket.measured(64)
    assert admission.tokens == 64
    ticket.started(32)
    assert (admission.requests, admission.tokens) == (1, 32)
    ticket.release()
    assert (admission.requests, admission.tokens) == (0, 0)


def test_the_refusal_says_what_is_full_and_when_to_come_back() -> None:
    admission = Admission(1, 1000)
    admission.enter(1, 500, EngineStats())
    with pytest.raises(QueueFullError, match="1 of 1 requests") as caught:
        admission.enter(1, 1, EngineStats(tokens_per_second=50.0))
    assert caught.value.retry_after_s == 5.0
    assert caught.value.status == 429


@pytest.mark.parametrize(
    ("tokens", "speed", "seconds"), [(0, 100, 1), (1000, 0, 1), (1000, 100, 5), (10**9, 1, 60), (10, 1000, 1)]
)
def test_retry_after_is_between_a_second_and_a_minute(tokens: int, speed: float, seconds: float) -> None:
    assert retry_after(tokens, speed) == seconds


def test_a_flood_shuts_out_only_itself() -> None:
    admission = Admission(max_requests=8, max_tokens=800)
    flood = [admission.enter(1, 10, EngineStats(), "flood") for _ in range(8)]
    with pytest.raises(QueueFullError):
        admission.enter(1, 10, EngineStats(), "flood")
    others = [admission.enter(1, 10, EngineStats(), "b") for _ in range(4)]
    with pytest.raises(QueueFullError):
        admission.enter(1, 10, EngineStats(), "b")  # half of the queue is its part
    with pytest.raises(QueueFullError):
        admission.enter(1, 1000, EngineStats(), "c")
    others += [admission.enter(1, 10, EngineStats(), "c") for _ in range(2)]
    for ticket in flood:
        ticket.release()
    flood = [admission.enter(1, 10, EngineStats(), "flood") for _ in range(2)]
    with pytest.raises(QueueFullError):
        admission.enter(1, 10, EngineStats(), "b")
    for ticket in [*flood, *others]:
        ticket.started(10)
    assert (admission.requests, admission.tokens) == (0, 0)
    assert not admission._held


def test_many_tenants_cannot_make_the_queue_endless() -> None:
    admission = Admission(max_requests=10, max_tokens=10_000)
    let_in = 0
    for number in range(100):
        with contextlib.suppress(QueueFullError):
            admission.enter(1, 1, EngineStats(), f"t{number}")
            let_in += 1
    assert 10 <= let_in <= 20
    assert admission.requests == let_in
