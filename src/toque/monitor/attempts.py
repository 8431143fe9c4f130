"""Which replicas worked on a request, and what each of them did for it. The client is billed once, for the whole."""

from __future__ import annotations

from typing import Protocol

from toque.monitor.ledger.record import Attempt, Outcome, UsageRecord

MOVED = "moved"  # the outcome of an attempt that another replica took over
_MOVES = ("retried", "migrated")


class Route(Protocol):
    """Where one sequence of a request went: a `toque.routing.base.RouteEvent`."""

    @property
    def kind(self) -> str: ...

    @property
    def replica_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def reason(self) -> str: ...


class Attempts:
    """An attempt is what one replica process did for a request, all choices together.

    Guarantee: the counts of a row's attempts add up to the row's. A row of one attempt needs none: it says it all.
    """

    __slots__ = ("_by_process", "_current")

    def __init__(self) -> None:
        self._by_process: dict[tuple[str, int], Attempt] = {}
        self._current: dict[int, Attempt] = {}

    def routed(self, choice: int, route: Route, now_us: int) -> None:
        """``now_us``: microseconds since the epoch."""
        if not route.replica_id:
            return
        before = self._current.get(choice)
        if before is not None and route.kind in _MOVES:
            before.outcome, before.error_code = MOVED, str(route.kind)
        key = (route.replica_id, route.epoch)
        attempt = self._by_process.get(key)
        new = attempt is None
        if attempt is None:
            name = f"{route.replica_id}.{route.epoch}"
            attempt = Attempt(len(self._by_process) + 1, name, now_us, Outcome.OPEN.value)
            self._by_process[key] = attempt
        if before is not None and route.kind == "hedged":
            # Until one of them has won, the first counts; whichever loses has given nothing that anybody sees.
            if new:
                attempt.outcome, attempt.error_code = MOVED, str(route.kind)
            return
        if route.kind == "won" and before is not attempt:
            self._current[choice] = attempt
            if before is not None and not any(before is other for other in self._current.values()):
                before.outcome, before.error_code = MOVED, "hedged"
            attempt.outcome, attempt.error_code = Outcome.OPEN.value, ""
        self._current[choice] = attempt

    def of(self, choice: int) -> Attempt | None:
        return self._current.get(choice)

    def finish(self, record: UsageRecord, outcome: Outcome, error_code: str) -> None:
        """The request is over: fill in its row's replica and, where there were several, its attempts."""
        attempts = list(self._by_process.values())
        if not attempts:
            return
        for attempt in attempts:
            if attempt.outcome == Outcome.OPEN.value:
                attempt.outcome, attempt.error_code = outcome.value, error_code
        answering = [attempt for attempt in attempts if attempt.outcome != MOVED]
        record.replica = (answering or attempts)[-1].replica
        if len(attempts) > 1:
            record.attempts = attempts
