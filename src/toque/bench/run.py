"""Runs a workload against a server, closed loop: `concurrency` requests are kept in flight until all are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from toque.bench.client import Record, Target, chat
from toque.bench.report import Report, summarize
from toque.bench.workload import Workload


async def run(
    target: Target, workload: Workload, *, warmup: int = 1, progress: Callable[[int], None] | None = None
) -> Report:
    """Send `warmup` requests that are not counted, then the workload."""
    for _ in range(warmup):
        await chat(target, "Say hello.", 4)
    pending = list(reversed(workload.prompts))
    records: list[Record] = []

    async def worker() -> None:
        while pending:
            records.append(await chat(target, pending.pop(), workload.output_tokens))
            if progress is not None:
                progress(len(records))

    await asyncio.gather(*(worker() for _ in range(min(workload.concurrency, len(pending)))))
    return summarize(workload.name, workload.concurrency, records)
