"""Health is progress: steps advance while work exists."""

from __future__ import annotations


class Progress:
    """Since when there has been work without a step finishing. Written by the step loop, read by anybody.

    Times are monotonic seconds, given by the caller.
    """

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def working(self, now: float) -> None:
        """A step is about to run."""
        if self._since is None:
            self._since = now

    def advanced(self, now: float) -> None:
        """A step has finished, and there is more work."""
        self._since = now

    def idle(self) -> None:
        self._since = None

    def stalled_s(self, now: float) -> float:
        """How long work has existed without a step finishing; 0 when idle."""
        since = self._since
        return 0.0 if since is None else max(0.0, now - since)
