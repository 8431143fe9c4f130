"""A request's moments as spans: whole, nested, and with the conventions' names."""

from __future__ import annotations

import pytest

from toque.monitor.ledger.record import UsageRecord
from toque.monitor.spans import Span, spans_of
from toque.monitor.trail import Trail, TrailKind
from toque.types import StepEvent, StepEventKind

T0 = 1_790_000_000_000_000


def row(**fields: object) -> UsageRecord:
    made = UsageRecord("chatcmpl-1", T0, prompt_tokens=300, cached_tokens=16, completion_tokens=7, status=200)
    made.outcome, made.finish_reason = "ok", "stop"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def life() -> Trail:
    trail = Trail("chatcmpl-1", T0, "mine", "acme", "/v1/chat/completions", "m")
    trail.note(0, TrailKind.ADMITTED)
    trail.note(10, TrailKind.PREPARED, tokens=300)
    trail.note(20, TrailKind.ROUTED, note="m-0.1")
    return trail


def step(kind: StepEventKind, at_us: int, tokens: int = 0, number: int = 0) -> StepEvent:
    return StepEvent(kind, at_us, tokens, number)


def tree(span: Span) -> list[tuple[str, int, int]]:
    """Names and times in microseconds from the request's beginning, depth first."""
    own = (span.name, span.start_ns // 1000 - T0, span.end_ns // 1000 - T0)
    return [own, *(line for child in span.children for line in tree(child))]


def assert_nested(span: Span) -> None:
    assert span.start_ns <= span.end_ns
    for child in span.children:
        assert span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns
        assert_nested(child)


def test_an_answer_has_an_attempt_with_its_phases() -> None:
    trail = life()
    trail.note(90, TrailKind.FIRST_TOKEN)
    trail.stepped(
        20,
        0,
        [step(StepEventKind.SCHEDULED, 10, 16, 4), step(StepEventKind.PREFILL, 60, 284, 4)],
    )
    trail.note(200, TrailKind.FINISHED, tokens=7, note="stop")
    trail.note(210, TrailKind.CLOSED, tokens=7, note="ok 200")
    span = spans_of(trail, row(), {"gen_ai.request.temperature": 0.5})
    assert tree(span) == [
        ("chat m", 0, 210),
        ("attempt m-0.1", 20, 200),
        ("queue", 20, 30),
        ("prefill", 30, 90),
        ("decode", 90, 200),
    ]
    assert_nested(span)
    assert span.error == ""
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.usage.input_tokens"] == 300
    assert span.attributes["gen_ai.usage.output_tokens"] == 7
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.response.time_to_first_chunk"] == 90e-6
    assert "error.type" not in span.attributes
    prefill = span.children[0].children[1]
    assert prefill.attributes == {"toque.tokens": 16, "toque.step": 4}
    assert prefill.events == [("chunk", (T0 + 80) * 1000, {"tokens": 284, "step": 4})]


def test_a_preemption_goes_back_to_the_queue() -> None:
    trail = life()
    trail.note(50, TrailKind.FIRST_TOKEN)
    trail.stepped(20, 0, [step(StepEventKind.SCHEDULED, 10), step(StepEventKind.PREFILL, 20, 300)])
    trail.stepped(
        20,
        0,
        [
            step(StepEventKind.PREEMPTED, 60, 305),
            step(StepEventKind.SCHEDULED, 80),
            step(StepEventKind.PREFILL, 100, 305),
        ],
    )
    trail.note(200, TrailKind.FINISHED)
    trail.note(210, TrailKind.CLOSED)
    span = spans_of(trail, row(), {})
    assert tree(span.children[0])[1:] == [
        ("queue", 20, 30),
        ("prefill", 30, 50),
        ("decode", 50, 80),
        ("queue", 80, 100),
        ("prefill", 100, 120),
        ("decode", 120, 200),
    ]
    assert_nested(span)


def test_retries_and_choices_are_attempts_of_one_request() -> None:
    trail = life()
    trail.note(25, TrailKind.ROUTED, choice=1, note="m-1.1")
    trail.note(60, TrailKind.MIGRATED, tokens=3, note="m-2.1: the replica died")
    trail.note(90, TrailKind.FINISHED, choice=1)
    trail.note(100, TrailKind.FINISHED)
    trail.note(110, TrailKind.CLOSED)
    span = spans_of(trail, row(), {})
    first, second, third = span.children
    assert [(s.name, s.attributes["toque.attempt"], s.attributes["toque.choice"]) for s in span.children] == [
        ("attempt m-0.1", 1, 0),
        ("attempt m-1.1", 1, 1),
        ("attempt m-2.1", 2, 0),
    ]
    assert first.error == "migrated"
    assert first.end_ns == third.start_ns
    assert third.attributes["toque.route.reason"] == "the replica died"
    assert second.error == third.error == ""
    assert_nested(span)


@pytest.mark.parametrize(("winner", "names"), [("m-0.1", ["m-0.1"]), ("m-9.1", ["m-0.1", "m-9.1"])])
def test_a_second_replica_is_an_attempt_where_it_won(winner: str, names: list[str]) -> None:
    trail = life()
    trail.note(50, TrailKind.HEDGED, note="m-9.1: no token after 1 s")
    trail.note(60, TrailKind.WON, note=winner)
    trail.note(100, TrailKind.FINISHED)
    trail.note(110, TrailKind.CLOSED)
    span = spans_of(trail, row(), {})
    assert [child.name for child in span.children] == [f"attempt {name}" for name in names]
    assert_nested(span)


def test_a_failure_is_an_error_and_a_client_that_left_is_none() -> None:
    trail = life()
    trail.note(80, TrailKind.CLOSED)
    failed = spans_of(trail, row(outcome="failed", status=500, error_code="replica_died"), {})
    assert failed.error == failed.attributes["error.type"] == "replica_died"
    assert tree(failed)[1] == ("attempt m-0.1", 20, 80)
    left = spans_of(trail, row(outcome="cancelled", status=499, error_code="client_closed_request"), {})
    assert left.error == ""
    assert left.attributes["http.response.status_code"] == 499
