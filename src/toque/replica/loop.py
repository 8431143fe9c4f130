"""The step loop: the one thread that touches the engine."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from toque.errors import EngineError, ToqueError, UnavailableError
from toque.replica.health import Progress
from toque.replica.requests import Command, Engine, RequestTable
from toque.types import EngineStats

STATS_INTERVAL_S = 0.1
REST_S = 0.25  # with nothing to do for so long, the replica does what can wait
MAX_FAILED_STEPS = 3


class StepLoop:
    """Runs the engine while there is work; sleeps, using no CPU, while there is none.

    ``post`` and ``drain`` may be called from any thread. ``run`` returns when the loop has drained, and raises
    EngineError when the engine fails again and again: then the process should be replaced.
    """

    def __init__(
        self,
        engine: Engine,
        table: RequestTable,
        progress: Progress,
        on_stats: Callable[[EngineStats], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_rest: Callable[[], object] | None = None,
    ) -> None:
        """``at_rest`` is called once, when there has been nothing to do for `REST_S` for the first time."""
        self._engine = engine
        self._table = table
        self._progress = progress
        self._on_stats = on_stats
        self._clock = clock
        self._at_rest = at_rest
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._drain_until: float | None = None
        self._failed_steps = 0
        self._stats_at = 0.0

    def post(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def drain(self, grace_s: float) -> None:
        """Return from ``run`` once every open request has ended, or after the grace. A later call can only hasten."""
        until = self._clock() + grace_s
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
        self._wake.set()

    def run(self) -> None:
        while True:
            while self._inbox:
                self._table.apply(self._inbox.popleft())
            if self._drain_until is not None and self._drained(self._drain_until):
                return
            if self._engine.has_work:
                self._step()
            elif not self._inbox:
                self._rest()

    def _step(self) -> None:
        self._progress.working(self._clock())
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._step_failed(error)
        else:
            self._failed_steps = 0
            self._table.deliver(outputs)
        now = self._clock()
        self._progress.advanced(now)
        if now - self._stats_at >= STATS_INTERVAL_S:
            self._stats_at = now
            self._on_stats(self._engine.stats())

    def _rest(self) -> None:
        if len(self._table):
            # The engine says there is nothing to do: without this their clients would wait for ever.
            self._table.fail_all(EngineError("the engine lost the request"))
        self._progress.idle()
        self._stats_at = 0.0
        self._on_stats(self._engine.stats())
        at_rest = self._at_rest
        if at_rest is not None and not self._wake.wait(REST_S):
            self._at_rest = None
            at_rest()
        self._wake.wait()
        self._wake.clear()

    def _step_failed(self, error: Exception) -> None:
        """Nobody knows which request was at fault, or what state theirs is in: all of them end here."""
        traceback.print_exception(error)
        self._failed_steps += 1
        message = error.message if isinstance(error, ToqueError) else f"{type(error).__name__}: {error}"
        self._table.fail_all(EngineError(f"the engine failed: {message}"))
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(
                f"{self._failed_steps} steps in a row failed, the last with {message}"
            ) from error

    def _drained(self, until: float) -> bool:
        if len(self._table) and self._clock() >= until:
            self._table.fail_all(
                UnavailableError("the replica is shutting down and the grace period is over")
            )
        return not len(self._table) and not self._inbox
