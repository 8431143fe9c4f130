"""Quantiles of a stream of positive values with a known relative error, in little memory, that can be merged.

Values are counted in buckets whose bounds grow by a constant factor (as in the DDSketch of Masson, Rim and Lee, VLDB
2019): bucket ``i`` holds ``(g^(i-1), g^i]`` with ``g = (1 + a) / (1 - a)``, and its middle ``2 g^i / (g + 1)`` is
within a part ``a`` of everything in it. So any quantile is within 1% of a value that really has that rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

ERROR = 0.01
LOWEST = 1e-6  # seconds; anything smaller counts as this
HIGHEST = 1e6
_GAMMA = (1 + ERROR) / (1 - ERROR)
_SCALE = 1 / math.log(_GAMMA)
_MIDDLE = 2 / (_GAMMA + 1)


class Sketch:
    """At most about 1,400 buckets, whatever comes. Merging loses nothing: it equals the sketch of all values."""

    __slots__ = ("buckets", "count", "sum")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        value = LOWEST if not value > LOWEST else HIGHEST if value > HIGHEST else value
        index = math.ceil(math.log(value) * _SCALE)
        self.buckets[index] = self.buckets.get(index, 0) + times
        self.count += times
        self.sum += value * times

    def merge(self, other: Sketch) -> None:
        mine = self.buckets
        for index, count in other.buckets.items():
            mine[index] = mine.get(index, 0) + count
        self.count += other.count
        self.sum += other.sum

    def quantiles(self, wanted: Iterable[float]) -> list[float]:
        """The value of each rank ``q * (count - 1)``, for ascending ``wanted``; 0.0 for an empty sketch."""
        found: list[float] = []
        ordered = iter(sorted(self.buckets.items()))
        index, seen = 0, 0
        for q in wanted:
            rank = q * (self.count - 1)
            while seen <= rank:
                entry = next(ordered, None)
                if entry is None:
                    break
                index, count = entry
                seen += count
            found.append(_MIDDLE * _GAMMA**index if self.count else 0.0)
        return found

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0
