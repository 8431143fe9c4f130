"""A request's life as lines for people, and as JSON."""

from __future__ import annotations

from typing import Any

from toque.monitor.ledger.record import UsageRecord
from toque.monitor.timeline import moments, tell
from toque.monitor.trail import Trail, TrailKind
from toque.types import StepEvent, StepEventKind

ROW: dict[str, Any] = {
    name: getattr(UsageRecord("cmpl-1", 1_790_000_000_000_000), name) for name in UsageRecord.__struct_fields__
} | {
    "client_id": "mine", "outcome": "ok", "status": 200, "endpoint": "/v1/completions", "model": "m", "version": "v1",
    "prompt_tokens": 300, "cached_tokens": 16, "completion_tokens": 7, "ttft_us": 90_000, "total_us": 120_000,
    "finish_reason": "stop", "replica": "m-0.2", "device_ns": 5_000_000, "cost_nano": 12, "list_nano": 1_500,
}  # fmt: skip


def a_life() -> Trail:
    trail = Trail("cmpl-1", 1_790_000_000_000_000, "mine", trace_id="ab" * 16)
    trail.note(100, TrailKind.ADMITTED)
    trail.note(900, TrailKind.PREPARED, tokens=300)
    trail.note(1_000, TrailKind.ROUTED, note="m-0.1")
    trail.note(30_000, TrailKind.MIGRATED, tokens=4, note="m-0.2: the replica died")
    trail.note(95_000, TrailKind.FIRST_TOKEN, tokens=1)
    trail.stepped(
        1_000,
        0,
        [
            StepEvent(StepEventKind.SCHEDULED, 2_000, 16, 40),
            StepEvent(StepEventKind.PREFILL, 9_000, 256, 40),
            StepEvent(StepEventKind.PREEMPTED, 12_000, 301, 44),
        ],
    )
    trail.note(119_000, TrailKind.FINISHED, tokens=7, note="stop")
    trail.note(120_000, TrailKind.CLOSED, tokens=7, note="ok 200 (stop)")
    return trail


def test_a_life_reads_in_order_with_times() -> None:
    lines = list(tell(ROW, a_life(), "EUR"))
    assert lines[0] == "cmpl-1  (mine)"
    assert lines[2].endswith("trace " + "ab" * 16)
    assert [line.strip() for line in lines[3:]] == [
        "+0.000 s  admitted",
        "+0.001 s  prepared: 300 prompt tokens",
        "+0.001 s  routed to m-0.1",
        "+0.003 s  scheduled in step 40, 16 tokens cached",
        "+0.010 s  prefill of 256 tokens in step 40",
        "+0.013 s  preempted in step 44, with 301 tokens to compute again",
        "+0.030 s  migrated after 4 tokens to m-0.2: the replica died",
        "+0.095 s  first token",
        "+0.119 s  finished (stop) after 7 tokens",
        "+0.120 s  closed: ok 200 (stop), 7 tokens",
        "300 prompt tokens (16 cached), 7 generated on m-0.2",
        "0.005 device-seconds, list 0.000001500 EUR, cost 0.000000012 EUR",
    ]


def test_choices_are_named_only_where_there_are_several() -> None:
    trail = a_life()
    trail.note(40_000, TrailKind.ROUTED, choice=1, note="m-1.1")
    text = "\n".join(tell(ROW, trail, "EUR"))
    assert "choice 0: routed to m-0.1" in text
    assert "choice 1: routed to m-1.1" in text
    assert "s  admitted" in text


def test_without_its_events_a_row_still_tells_what_it_knows() -> None:
    text = "\n".join(tell(ROW, None, "EUR"))
    assert "waited 0.000 s" in text
    assert "+0.090 s  first token" in text
    assert "+0.120 s  ok 200 (stop)" in text


def test_a_request_that_runs_is_told_as_far_as_it_is() -> None:
    trail = Trail("cmpl-2", 5, "c", endpoint="/v1/completions", model="m")
    trail.note(1, TrailKind.ADMITTED)
    lines = list(tell(None, trail, "EUR"))
    assert lines[-1].strip() == "still open"


def test_attempts_are_told_apart() -> None:
    attempts = [
        {"number": 1, "replica": "m-0.1", "outcome": "moved", "error_code": "migrated", "prompt_tokens": 300,
         "completion_tokens": 4},
        {"number": 2, "replica": "m-0.2", "outcome": "ok", "error_code": "", "prompt_tokens": 0,
         "completion_tokens": 3},
    ]  # fmt: skip
    text = "\n".join(tell({**ROW, "attempts": attempts}, None, "EUR"))
    assert "attempt 1 on m-0.1: moved (migrated), 300 + 4 tokens" in text
    assert "attempt 2 on m-0.2: ok, 0 + 3 tokens" in text


def test_json_leaves_out_what_is_empty() -> None:
    told = moments(a_life())
    assert told[0] == {"seconds": 0.0001, "event": "admitted"}
    assert told[2] == {"seconds": 0.001, "event": "routed", "choice": 0, "note": "m-0.1"}
    assert told[4] == {"seconds": 0.01, "event": "prefill", "choice": 0, "tokens": 256, "step": 40}
