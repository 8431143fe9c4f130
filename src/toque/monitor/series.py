"""Counts and distributions as plain numbers: writing one takes part of a microsecond, reading them is for scrapes.

Written from one thread. prometheus-client's own types take a lock and 1 to 3 µs a value, which every token would pay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, log2

SCHEMA = 3  # of native histograms: 2 ** 3 buckets for each doubling
PER_DOUBLING = 2**SCHEMA
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
_INTER_TOKEN = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3, 10)
_END_TO_END = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
_QUEUE = (0.001, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)


class Distribution:
    """How many values were at most each bound, and beyond the last; and their sum.

    Beside the bounds, for who reads native histograms, ``sparse`` counts in buckets that each end 9 % above the one
    before: bucket i holds what is above 2 ** ((i - 1) / 8) and at most 2 ** (i / 8). ``zeros`` are what is not above 0.
    """

    __slots__ = ("bounds", "counts", "sparse", "sum", "zeros")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sparse: dict[int, int] = {}
        self.zeros = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        if value > 0.0:
            bucket = ceil(log2(value) * PER_DOUBLING)
            self.sparse[bucket] = self.sparse.get(bucket, 0) + times
        else:
            self.zeros += times

    def cumulative(self) -> list[int]:
        """For each bound the values at most it; all of them last."""
        total = 0
        found = []
        for count in self.counts:
            total += count
            found.append(total)
        return found


class ModelSeries:
    """What is measured of one served model. Tokens are whole numbers; times are seconds."""

    __slots__ = (
        "answer_sizes",
        "cached_tokens",
        "end_to_end",
        "finished",
        "first_token",
        "generated_tokens",
        "inter_token",
        "prompt_sizes",
        "prompt_tokens",
        "queue",
    )

    def __init__(self) -> None:
        self.first_token = Distribution(_FIRST_TOKEN)
        self.inter_token = Distribution(_INTER_TOKEN)
        self.end_to_end = Distribution(_END_TO_END)
        self.queue = Distribution(_QUEUE)
        self.prompt_sizes = Distribution(_TOKENS)
        self.answer_sizes = Distribution(_TOKENS)
        self.finished: dict[str, int] = {}  # choices by their finish reason
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
