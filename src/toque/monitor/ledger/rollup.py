"""Requests added up by hour and day: a pure fold, in the same transaction as the rows that it adds up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, itemgetter
from typing import Any

from toque.monitor.ledger.record import UsageRecord
from toque.monitor.ledger.tables import MEASURES

_measures = itemgetter(*MEASURES)
# In the order of tables.GROUPS and tables.MEASURES; a test holds them together.
Group = tuple[int, str, str, str, str, str]


def fold(records: Iterable[UsageRecord], seconds: int) -> list[dict[str, Any]]:
    """Roll-up rows of closed records, by the time they were closed: a period's sums do not change after its end."""
    rows: dict[Group, dict[str, Any]] = {}
    for r in records:
        bucket = r.closed_at // 1_000_000 // seconds * seconds
        key = (bucket, r.tenant, r.key_id, r.model, r.version, r.endpoint)
        row = rows.get(key)
        if row is None:
            row = rows[key] = {
                "bucket": bucket,
                "tenant": r.tenant,
                "key_id": r.key_id,
                "model": r.model,
                "version": r.version,
                "endpoint": r.endpoint,
                "requests": 0,
                "ok": 0,
                "cancelled": 0,
                "failed": 0,
                "refused": 0,
                "lost": 0,
                "choices": 0,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "reasoning_tokens": 0,
                "queue_us": 0,
                "ttft_us": 0,
                "total_us": 0,
                "device_ns": 0,
                "list_nano": 0,
                "cost_nano": 0,
            }
        row["requests"] += 1
        row[r.outcome] += 1
        row["choices"] += r.choices
        row["prompt_tokens"] += r.prompt_tokens
        row["cached_tokens"] += r.cached_tokens
        row["completion_tokens"] += r.completion_tokens
        row["reasoning_tokens"] += r.reasoning_tokens
        row["queue_us"] += r.queue_us
        row["ttft_us"] += r.ttft_us
        row["total_us"] += r.total_us
        row["device_ns"] += r.device_ns
        row["list_nano"] += r.list_nano
        row["cost_nano"] += r.cost_nano
    # Sorted: gateways that add to the same rows at once must take their locks in the same order.
    return [rows[key] for key in sorted(rows)]


def coarser(rows: Iterable[dict[str, Any]], seconds: int, groups: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a roll-up with longer periods or fewer groups, from those of a finer one."""
    sums: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for row in rows:
        key = (row["bucket"] // seconds * seconds, *[row[group] for group in groups])
        values, known = _measures(row), sums.get(key)
        sums[key] = values if known is None else tuple(map(add, known, values))
    names = ("bucket", *groups, *MEASURES)
    return [dict(zip(names, (*key, *sums[key]), strict=True)) for key in sorted(sums)]
