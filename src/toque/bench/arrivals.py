"""When requests are due, fixed before the first is sent: an open loop, which no slow answer can slow down."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

Process = Literal["constant", "poisson"]


def arrivals(process: Process, rate: float, seed: str, *, requests: int, duration_s: float) -> list[float]:
    """Seconds after the start at which each request is due, ascending; ``rate`` requests a second on average.

    The first is due at once. ``constant`` leaves 1/rate between two; ``poisson`` draws every gap from the
    exponential distribution of that mean, as independent users would. Ends after ``requests`` requests or before
    ``duration_s`` seconds, whichever comes first.
    """
    due = takewhile(lambda at: at < duration_s, _times(process, rate, seed))
    return [at for at, _ in zip(due, range(requests), strict=False)]


def _times(process: Process, rate: float, seed: str) -> Iterator[float]:
    rng = random.Random(f"arrivals/{seed}")
    index, at = 0, 0.0
    while True:
        yield at
        index += 1
        at = index / rate if process == "constant" else at + rng.expovariate(rate)
