"""What a measurement leaves behind: a JSON document with every sample, and a CSV with a line per request."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from toque.bench.report import Run
from toque.bench.session import Result
from toque.bench.slo import Slo
from toque.errors import ConfigError

FORMAT = "toque-bench/1"
_COLUMNS = ("planned", "sent", "first", "done", "prompt_tokens", "cached_tokens", "output_tokens", "error")


def document(results: Sequence[Result], facts: dict[str, Any], slo: Slo | None) -> dict[str, Any]:
    """Everything: ``facts`` about the measurement, and per load a summary, the report of each repeat, and samples."""
    return {
        "format": FORMAT,
        **facts,
        "results": [
            {
                "name": result.load.name,
                "profile": str(result.load.profile),
                "dataset": result.load.dataset.name,
                "summary": result.summary(slo).as_dict(),
                "repeats": [
                    {"report": Result(result.load, [run]).summary(slo).as_dict(), "samples": _samples(run)}
                    for run in result.runs
                ],
            }
            for result in results
        ],
    }


def read(data: bytes, name: str) -> dict[str, Any]:
    """The document of an earlier measurement. Raises ConfigError, which names the file, for anything else."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is no JSON report of `toque bench`: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{name} is no JSON report of `toque bench` (format {FORMAT})")
    return found


def _samples(run: Run) -> list[dict[str, Any]]:
    """A row per request: times in seconds after the first planned send, gaps between events in microseconds."""
    start = min((r.planned for r in run.records), default=0.0)
    return [
        {
            "planned": round(r.planned - start, 6),
            "sent": round(r.sent - start, 6),
            "first": round(r.first - start, 6) if r.arrivals else None,
            "done": round(r.done - start, 6),
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "output_tokens": r.completion_tokens,
            "error": r.kind,
            "gaps_us": [round(gap * 1e6) for gap in r.gaps],
        }
        for r in run.records
    ]


def as_csv(report: dict[str, Any]) -> str:
    """One line per request of every repeat; times in seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("name", "repeat", "request", *_COLUMNS, "ttft", "tpot", "longest_gap", "e2e"))
    for result in report["results"]:
        for repeat, run in enumerate(result["repeats"]):
            for number, row in enumerate(run["samples"]):
                cells = [result["name"], repeat, number, *(row[c] for c in _COLUMNS)]
                gaps = row["gaps_us"]
                ttft = None if row["first"] is None else round(row["first"] - row["planned"], 6)
                tpot = (
                    round(sum(gaps) / 1e6 / (row["output_tokens"] - 1), 6)
                    if row["output_tokens"] > 1
                    else None
                )
                longest = max(gaps) / 1e6 if gaps else None
                writer.writerow([*cells, ttft, tpot, longest, round(row["done"] - row["planned"], 6)])
    return out.getvalue()
