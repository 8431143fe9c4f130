"""A circuit breaker: a replica that fails again and again gets a rest, then one request to show that it works.

::

    closed ── failures in a row ──▶ open ── after a while ──▶ half open ── the probe succeeds ──▶ closed
                                      ▲                          │
                                      └──── the probe fails ─────┘   (twice as long as before)
"""

from __future__ import annotations

FAILURES = 5
REST_S = 5.0
MAX_REST_S = 60.0


class Breaker:
    """One replica's. Times are monotonic seconds, given by the caller.

    A failure is an answer that the engine gave up, a refusal by a replica that said it was ready, or a silence in
    which requests were taken away from it. What is a request's own fault (its deadline, its grammar, its length), and
    a full queue, says nothing about the replica.
    """

    __slots__ = ("_failures", "_first_rest_s", "_limit", "_probing", "_rest_s", "_until")

    def __init__(self, failures: int = FAILURES, rest_s: float = REST_S) -> None:
        self._limit = failures
        self._first_rest_s = self._rest_s = rest_s
        self._failures = 0
        self._until = 0.0  # it rests until then
        self._probing = False

    @property
    def open(self) -> bool:
        """Open or half open: not trusted as the others are."""
        return self._failures >= self._limit

    def allows(self, now: float) -> bool:
        return not self.open or (now >= self._until and not self._probing)

    def sent(self) -> None:
        """A request goes there: of an open breaker, the probe."""
        self._probing = self.open

    def left(self) -> None:
        """The request ended without saying anything about the replica."""
        self._probing = False

    def succeeded(self) -> None:
        self._failures = 0
        self._probing = False
        self._rest_s = self._first_rest_s

    def failed(self, now: float) -> None:
        if self.open and not self._probing:
            return  # sent before it opened
        if self.open:
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        self._failures += 1
        self._probing = False
        self._until = now + self._rest_s
