"""When a replica is not trusted, and how it is trusted again."""

from __future__ import annotations

from toque.routing.breaker import Breaker


def failing(times: int, now: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, rest_s=5)
    for _ in range(times):
        breaker.sent()
        breaker.failed(now)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = failing(2)
    assert breaker.allows(0)
    breaker.succeeded()
    breaker.failed(0)
    breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.allows(4.9)


def test_one_probe_at_a_time_and_its_success_closes() -> None:
    breaker = failing(3)
    assert breaker.allows(5.1)
    breaker.sent()
    assert not breaker.allows(5.2)
    breaker.left()  # its client went away: the next may try
    assert breaker.allows(5.3)
    breaker.sent()
    breaker.succeeded()
    assert breaker.allows(5.4)
    assert not breaker.open


def test_a_failed_probe_rests_twice_as_long_up_to_a_minute() -> None:
    breaker, now = failing(3), 0.0
    for rest in (5, 10, 20, 40, 60, 60):
        assert not breaker.allows(now + rest - 0.1)
        now += rest
        assert breaker.allows(now)
        breaker.sent()
        breaker.failed(now)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(now)
    assert breaker.allows(now + 5)


def test_failures_of_what_was_sent_before_it_opened_do_not_prolong_the_rest() -> None:
    breaker = failing(3)
    for _ in range(10):
        breaker.failed(4.0)
    assert breaker.allows(5.0)
