from __future__ import annotations

from toque.engine.queue import FairQueue
from toque.engine.sequence import Sequence
from toque.types import EngineRequest, SamplingParams


class Line:
    """A queue, and sequences for it."""

    def __init__(self, **weights: float) -> None:
        self.queue = FairQueue(weights)
        self.arrivals = 0

    def add(self, tenant: str = "", priority: int = 0, tokens: int = 4) -> Sequence:
        self.arrivals += 1
        request = EngineRequest(
            f"{tenant}{self.arrivals}", (1,) * tokens, SamplingParams(), tenant=tenant, priority=priority
        )
        sequence = Sequence(
            request,
            request.sampling,
            arrival=self.arrivals,
            tenant=self.queue.join(tenant),
            root=b"",
            end=99,
            scoring=False,
        )
        self.queue.push(sequence)
        return sequence

    def take(self, served: int = 0) -> str:
        first = self.queue.first()
        assert first is not None
        self.queue.remove(first)
        first.tenant.served += served * first.tenant.per_token
        return first.id


def test_arrival_decides_within_a_tenant() -> None:
    line = Line()
    for _ in range(3):
        line.add("a")
    assert [line.take() for _ in range(3)] == ["a1", "a2", "a3"]
    assert line.queue.first() is None
    assert len(line.queue) == line.queue.tokens == 0


def test_priority_comes_before_everything() -> None:
    line = Line()
    line.add("a", priority=1)
    line.add("b", priority=0).tenant.served = 1000.0
    line.add("c", priority=-5).tenant.served = 5000.0
    assert line.queue.best_priority() == -5
    assert [line.take() for _ in range(3)] == ["c3", "b2", "a1"]


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    line = Line()
    for _ in range(5):
        line.add("flood")
    line.add("b")
    line.add("b")
    order = [line.take(served=100) for _ in range(7)]
    assert order == ["flood1", "b6", "flood2", "b7", "flood3", "flood4", "flood5"]


def test_weights_scale_the_shares() -> None:
    line = Line(big=2.0)
    for _ in range(30):
        line.add("big")
        line.add("small")
    order = [line.take(served=10)[:3] for _ in range(30)]
    assert order.count("big") == 20


def test_who_was_away_is_not_owed_the_time() -> None:
    line = Line()
    first = line.add("a")
    first.tenant.served = 1000.0
    late = line.add("late")
    assert late.tenant.served == 1000.0


def test_who_leaves_and_returns_keeps_a_debt() -> None:
    line = Line()
    other = line.add("other")
    greedy = line.add("greedy")
    greedy.tenant.served = 500.0
    line.queue.remove(greedy)
    line.queue.leave(greedy.tenant)
    assert line.add("greedy").tenant.served == 500.0
    assert other.tenant.served == 0.0


def test_accounts_of_tenants_that_left_do_not_pile_up() -> None:
    line = Line()
    line.add("stays")
    for i in range(5000):
        sequence = line.add(f"t{i}")
        line.queue.remove(sequence)
        line.queue.leave(sequence.tenant)
    assert len(line.queue._tenants) < 1200


def test_a_preempted_sequence_returns_to_the_front() -> None:
    line = Line()
    first, second = line.add("a"), line.add("a")
    line.queue.remove(first)
    line.queue.push(first, front=True)
    assert line.queue.first() is first
    assert list(line.queue) == [first, second]
