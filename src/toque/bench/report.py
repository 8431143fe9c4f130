"""From request records to the figures people compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toque.bench.client import Record


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

        return cls(sum(ranked) / len(ranked), rank(0.50), rank(0.95), rank(0.99))


@dataclass(frozen=True, slots=True)
class Report:
    """One workload against one server. Rates are over the wall time from first send to last byte."""

    workload: str
    requests: int
    failed: int
    concurrency: int
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    ttft: Percentiles
    inter_token: Percentiles
    end_to_end: Percentiles
    errors: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(workload: str, concurrency: int, records: Sequence[Record]) -> Report:
    """Failed requests count in `failed` and in nothing else."""
    good = [r for r in records if r.ok]
    seconds = max((r.done for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    gaps = [b - a for r in good for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]
    output = sum(r.completion_tokens for r in good)
    return Report(
        workload=workload,
        requests=len(records),
        failed=len(records) - len(good),
        concurrency=concurrency,
        seconds=seconds,
        requests_per_second=len(good) / seconds if seconds else 0.0,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        output_tokens_per_second=output / seconds if seconds else 0.0,
        ttft=Percentiles.of([r.first - r.sent for r in good if r.arrivals]),
        inter_token=Percentiles.of(gaps),
        end_to_end=Percentiles.of([r.done - r.sent for r in good]),
        errors=tuple(sorted({r.error or f"status {r.status}" for r in records if not r.ok}))[:5],
    )
