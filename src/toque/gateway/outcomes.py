"""What clients saw of each version of a deployment, counted for whoever judges it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from toque.errors import ToqueError, VersionGoneError
from toque.routing.base import LATENCY_BOUNDS, VersionOutcomes


@dataclass(slots=True)
class Pace:
    """How one request went at one version. Times are ``time.perf_counter`` seconds."""

    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # of its tokens
    last: float = 0.0
    tokens: int = 0
    started: bool = False  # something of the answer has come
    completed: bool = False

    def advance(self, tokens: int, now: float) -> None:
        if self.tokens == 0:
            self.first = now
        self.tokens += tokens
        self.last = now


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    errors: int = 0
    answered: int = 0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    tpot_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))


class Outcomes:
    """One deployment's. A request that fails through no fault of its client counts as an error of the version that
    failed it, also when another version answered it after all. One whose client left counts as a request only."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    @contextmanager
    def attempt(self, version: str, pace: Pace) -> Iterator[None]:
        """One request at one version, from its preparation to its end. Set ``pace.completed`` in the end."""
        counts = self._counts.setdefault(version, _Counts())
        try:
            yield
        except VersionGoneError:
            raise
        except ToqueError as error:
            counts.requests += 1
            counts.errors += error.status >= 500
            raise
        except BaseException:  # the client left, the server stops, or the time was over
            counts.requests += 1
            counts.errors += not pace.tokens and time.perf_counter() - pace.began > LATENCY_BOUNDS[-1]
            raise
        counts.requests += 1
        if pace.completed:
            self._answered(counts, pace)

    def snapshot(self) -> dict[str, VersionOutcomes]:
        return {
            version: VersionOutcomes(
                counts.requests,
                counts.errors,
                counts.answered,
                counts.ttft_seconds,
                counts.tpot_seconds,
                tuple(counts.ttft_counts),
                tuple(counts.tpot_counts),
            )
            for version, counts in self._counts.items()
        }

    def keep(self, versions: Collection[str]) -> None:
        """Forgets the others."""
        for version in [version for version in self._counts if version not in versions]:
            del self._counts[version]

    @staticmethod
    def _answered(counts: _Counts, pace: Pace) -> None:
        counts.answered += 1
        if pace.tokens == 0:
            return
        ttft = pace.first - pace.began
        counts.ttft_seconds += ttft
        counts.ttft_counts[bisect_left(LATENCY_BOUNDS, ttft)] += 1
        if pace.tokens > 1:
            tpot = (pace.last - pace.first) / (pace.tokens - 1)
            counts.tpot_seconds += tpot
            counts.tpot_counts[bisect_left(LATENCY_BOUNDS, tpot)] += 1
