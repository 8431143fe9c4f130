"""`toque top` shows what /admin/v1/stats says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from toque.cli.top import duration, view
from toque.monitor.latency import Percentiles

NOTHING = {"1m": {"count": 0, "mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}}


def shown(stats: dict[str, Any], window: str = "1m") -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view(stats, window))
    return console.export_text().splitlines()


def stats(**fields: Any) -> dict[str, Any]:
    engine = {
        "running": 3,
        "waiting": 1,
        "kv_blocks_used": 25,
        "kv_blocks_total": 100,
        "tokens_per_second": 212.4,
    }
    window = {"count": 9, "mean": 0.1, "p50": 0.0123, "p95": 0.25, "p99": 3.2}
    model = {
        "state": "ready",
        "reason": "",
        "engine": engine,
        "latency": {"ttft": {"1m": window}, "e2e": NOTHING},
        "since_start": {"cost_per_million_tokens": 0.125, "currency": "EUR"},
    }
    ledger = {"state": "ok", "reason": "", "written": 12, "open": 4, "lost": 0, "rejected": 0}
    return {"models": {"smollm2": {**model, **fields}}, "ledger": ledger}


def test_a_line_per_model_and_the_ledgers_state() -> None:
    head, line, *_, last = shown(stats())
    assert head.split() == ["model", "state", "run", "wait", "KV", "tok/s", "TTFT", "ITL", "E2E", "cost/Mtok"]
    assert line.split() == "smollm2 ready 3 1 25% 212 12ms / 250ms / 3.2s - - 0.1250 EUR".split()
    assert last == "ledger: ok, 12 rows, 4 open"


def test_several_replicas_have_a_line_each() -> None:
    found = stats()
    model = found["models"]["smollm2"]
    model["replicas"] = {
        "smollm2-0": {
            "state": "ready",
            "reason": "",
            "engine": model["engine"] | {"memory_bytes": 3 * 2**29},
        },
        "smollm2-1": {
            "state": "starting",
            "reason": "restarting: killed",
            "engine": model["engine"] | {"running": 0},
        },
    }
    _, line, first, second, *_ = shown(found)
    assert line.split()[:2] == ["smollm2", "ready"]
    assert first.split() == "smollm2-0 ready 3 1 25% 212 1.5 GiB".split()
    assert second.split() == "smollm2-1 starting 0 1 25% 212 restarting: killed".split()
    del model["replicas"]["smollm2-1"]
    assert "smollm2-0" not in "\n".join(shown(found))  # the model's line says it all


def test_what_is_not_there_is_a_dash() -> None:
    found = stats(latency={})
    del found["models"]["smollm2"]["since_start"]
    found["models"]["smollm2"]["engine"]["kv_blocks_total"] = 0
    found["ledger"] = None
    _, line, *_, last = shown(found, "60m")
    assert line.split() == "smollm2 ready 3 1 - 212 - - - -".split()
    assert last == "ledger: off"


def test_a_ledger_in_trouble_says_why() -> None:
    found = stats()
    found["ledger"] |= {"state": "losing", "reason": "the journal is full", "lost": 2, "rejected": 1}
    assert shown(found)[-1] == "ledger: losing, 12 rows, 4 open, 3 lost (the journal is full)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00004, "0.0ms"),
        (0.0074, "7.4ms"),
        (0.00996, "10ms"),
        (0.2124, "212ms"),
        (0.9996, "1.0s"),
        (95.2, "95s"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_fields_are_those_of_the_snapshot() -> None:
    assert set(Percentiles.__dataclass_fields__) == set(NOTHING["1m"])
