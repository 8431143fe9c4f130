"""How many tokens per second an engine is generating."""

from __future__ import annotations

from collections import deque


class TokenRate:
    """Generated tokens over the last few seconds, in slices so that a step costs next to nothing."""

    __slots__ = ("_slices", "_started", "slice_s", "window_s")

    def __init__(self, window_s: float = 5.0, slice_s: float = 0.25) -> None:
        self.window_s = window_s
        self.slice_s = slice_s
        self._slices: deque[list[float]] = deque()  # [begin, tokens]
        self._started = -1.0  # of the first slice after a pause

    def add(self, tokens: int, now: float) -> None:
        """``now`` never goes backwards; seconds on any clock."""
        slices = self._slices
        if slices and now - slices[-1][0] < self.slice_s:
            slices[-1][1] += tokens
            return
        slices.append([now, float(tokens)])
        while now - slices[0][0] > self.window_s:
            slices.popleft()

    def per_second(self, now: float) -> float:
        recent = [(begin, tokens) for begin, tokens in self._slices if now - begin <= self.window_s]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], self.slice_s)
