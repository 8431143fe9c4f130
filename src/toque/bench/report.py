"""From request records to the figures people compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toque.bench.client import Record
from toque.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; nearest-rank percentiles, so that each is a value that occurred."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ranked = sorted(values)

        def rank(share: float) -> float:
            return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

        return cls(math.fsum(ranked) / len(ranked), rank(0.50), rank(0.95), rank(0.99))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept the objective, and how many of them a second."""

    slo: str
    met: int
    share: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Report:
    """One load on one server. Rates are over the wall time from the first planned send to the last byte.

    Latencies count from the planned send (see `Record`); ``ttft_since_sent`` and ``e2e_since_sent`` count from the
    actual one, and ``send_delay`` is the difference: what this client was late.
    """

    requests: int
    failed: int
    errors: dict[str, int]  # connect, timeout, closed, protocol, stream, "HTTP 429", ... → how many
    messages: tuple[str, ...]  # what some of them said
    seconds: float
    in_flight: int  # most requests open at once
    offered_per_second: float | None  # open loop: requests planned a second
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    tokens_from: str  # "usage", "events" (the server sends no usage: prompts are not counted), or "both"
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    ttft_since_sent: Percentiles
    e2e_since_sent: Percentiles
    send_delay: Percentiles
    goodput: Goodput | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run of a load, in planned order."""

    records: Sequence[Record]
    offered_per_second: float | None = None


def summarize(runs: Sequence[Run], slo: Slo | None = None) -> Report:
    """Over one run, or several of the same load: latencies over all requests, rates over the sum of their times.

    Failed requests count in ``failed``, ``errors`` and the goodput's share, and in nothing else.
    """
    records = [r for run in runs for r in run.records]
    good = [r for r in records if r.ok]
    seconds = math.fsum(_span(run.records) for run in runs)
    output = sum(r.completion_tokens for r in good)
    total = output + sum(r.prompt_tokens for r in good)
    sources = {r.from_usage for r in good}
    offered = [run.offered_per_second for run in runs if run.offered_per_second is not None]
    goodput = None
    if slo is not None:
        met = sum(slo.met_by(r) for r in records)
        goodput = Goodput(str(slo), met, _ratio(met, len(records)), _ratio(met, seconds))
    return Report(
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(r.kind for r in records if not r.ok).most_common()),
        messages=tuple(dict.fromkeys(f"{r.kind}: {r.error}" for r in records if not r.ok))[:5],
        seconds=seconds,
        in_flight=max((_most_open(run.records) for run in runs), default=0),
        offered_per_second=math.fsum(offered) / len(offered) if offered else None,
        requests_per_second=_ratio(len(good), seconds),
        prompt_tokens=total - output,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        output_tokens_per_second=_ratio(output, seconds),
        total_tokens_per_second=_ratio(total, seconds),
        tokens_from="both" if len(sources) == 2 else "events" if sources == {False} else "usage",
        ttft=Percentiles.of([r.ttft for r in good if r.ttft is not None]),
        tpot=Percentiles.of([r.tpot for r in good if r.tpot is not None]),
        itl=Percentiles.of([gap for r in good for gap in r.gaps]),
        e2e=Percentiles.of([r.e2e for r in good]),
        ttft_since_sent=Percentiles.of([r.first - r.sent for r in good if r.arrivals]),
        e2e_since_sent=Percentiles.of([r.done - r.sent for r in good]),
        send_delay=Percentiles.of([r.sent - r.planned for r in records]),
        goodput=goodput,
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _span(records: Sequence[Record]) -> float:
    return max((r.done for r in records), default=0.0) - min((r.planned for r in records), default=0.0)


def _most_open(records: Sequence[Record]) -> int:
    """An end at the same moment as a start comes first."""
    steps = sorted([(r.sent, 1) for r in records] + [(r.done, -1) for r in records])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
