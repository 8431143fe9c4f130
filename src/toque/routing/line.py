"""Waiting for a change, in the order of arrival."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress


class WaitingLine:
    """Those who wait for a change. `wake` wakes all of them in the order of their places, so that the first who came
    looks first, however long ago that was and however often each has looked before.

    Time passes without an event (deadlines, rests): while anybody waits, all are woken every ``recheck_s``, together,
    for one who looked again by itself would be behind those who had not.
    """

    def __init__(self, recheck_s: float) -> None:
        self._recheck_s = recheck_s
        self._places = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def place(self) -> int:
        """A place behind all that have been given."""
        self._places += 1
        return self._places

    async def changed(self, place: int, until: float) -> None:
        """Returns at the next `wake`, or at ``until`` (monotonic seconds). One task waits at a place."""
        loop = asyncio.get_running_loop()
        self._waiting[place] = woken = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_later(self._recheck_s, self._recheck)
        try:
            # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await woken
        finally:
            if self._waiting.get(place) is woken:
                del self._waiting[place]

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for place in sorted(waiting):
            if not waiting[place].done():  # it is, where the waiting task has been cancelled
                waiting[place].set_result(None)

    def _recheck(self) -> None:
        self._timer = None  # whoever looks and waits on starts it again
        self.wake()
