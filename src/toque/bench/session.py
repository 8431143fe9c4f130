"""A whole measurement: every load of a plan, repeated in turns, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toque.bench.arrivals import Process
from toque.bench.client import Record, Target
from toque.bench.dataset import Dataset
from toque.bench.report import Report, Run, summarize
from toque.bench.run import ClosedLoop, Load, OpenLoop, measure
from toque.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Sweep:
    """From an idle server to a full one: one stream, then ``streams`` at once, then ``levels`` rates of an open
    loop in even steps between the requests a second of both, the last of them the higher."""

    dataset: Dataset
    requests: int
    duration_s: float = float("inf")
    streams: int = 64
    levels: int = 5
    process: Process = "poisson"

    def ends(self) -> list[Load]:
        both = (ClosedLoop(), ClosedLoop(self.streams))
        return [Load(f"sweep {p}", self.dataset, p, self.requests, self.duration_s) for p in both]

    def between(self, low: float, high: float) -> list[Load]:
        """Nothing where many streams are no faster than one: there is no rate between."""
        if high <= 1.05 * low:
            return []
        rates = [low + (high - low) * step / self.levels for step in range(1, self.levels + 1)]
        profiles = [OpenLoop(self.process, float(f"{rate:.3g}")) for rate in rates]
        return [Load(f"sweep {p}", self.dataset, p, self.requests, self.duration_s) for p in profiles]


@dataclass(slots=True)
class Result:
    """A load and its runs, one for each repeat."""

    load: Load
    runs: list[Run] = field(default_factory=list)

    def summary(self, slo: Slo | None = None) -> Report:
        return summarize(self.runs, slo)


@dataclass(frozen=True, slots=True)
class Session:
    """How to measure. Repeats take turns (A B A B), so that a machine that drifts hits all loads alike, and each has
    prompts of its own, so that none finds its text in the server's prefix cache."""

    target: Target
    repeats: int = 1
    warm_up: int = 1
    seed: int = 0
    timeout_s: float = 600.0
    progress: Callable[[str, Record], None] | None = None

    async def run(self, loads: Sequence[Load], sweep: Sweep | None = None) -> list[Result]:
        results = [Result(load) for load in loads]
        ends = [Result(load) for load in sweep.ends()] if sweep else []
        between: list[Result] = []
        for repeat in range(self.repeats):
            for result in results + ends:
                result.runs.append(await self._one(result.load, repeat))
            if sweep and repeat == 0:
                low, high = (result.summary().requests_per_second for result in ends)
                between = [Result(load) for load in sweep.between(low, high)]
            for result in between:
                result.runs.append(await self._one(result.load, repeat))
        return results + ends + between

    async def _one(self, load: Load, repeat: int) -> Run:
        progress = self.progress
        return await measure(
            self.target,
            load,
            seed=f"{self.seed}/{repeat}",
            warm_up=self.warm_up,
            timeout_s=self.timeout_s,
            progress=None if progress is None else lambda record: progress(load.name, record),
        )
