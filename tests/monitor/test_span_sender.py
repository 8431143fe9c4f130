"""Spans as OpenTelemetry's own library hands them on: to memory, and to a collector over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fixtures.collector import collector
from toque.errors import ConfigError
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.span_sender import MAX_WAITING, SpanSender
from toque.monitor.spans import Refusal
from toque.monitor.trace_context import TraceContext
from toque.monitor.trail import Trail, TrailKind

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "1" * 16, "00f067aa0ba902b7", True, "vendor=1")


def closed(number: int = 1) -> tuple[Trail, UsageRecord]:
    trail = Trail(f"cmpl-{number}", 1_790_000_000_000_000, "mine", "", "/v1/completions", "m")
    trail.note(20, TrailKind.ROUTED, note="m-0.1")
    trail.note(99, TrailKind.CLOSED)
    row = UsageRecord(f"cmpl-{number}", trail.opened_at, prompt_tokens=3, completion_tokens=4)
    row.outcome, row.status, row.error_code = "failed", 500, "engine_error"
    return trail, row


def test_spans_join_the_callers_trace() -> None:
    memory = InMemorySpanExporter()
    sender = SpanSender("http://127.0.0.1:1", exporter=lambda: memory)
    sender.send(*closed(), TRACE, {"gen_ai.request.seed": 7})
    sender.stop()
    child, root = memory.get_finished_spans()
    assert (root.name, child.name) == ("text_completion m", "attempt m-0.1")
    assert (root.kind, child.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert root.context is not None
    assert root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE.trace_id
    assert f"{root.context.span_id:016x}" == TRACE.span_id
    assert f"{root.parent.span_id:016x}" == TRACE.parent_id
    assert root.parent.is_remote
    assert root.context.trace_state.get("vendor") == "1"
    assert child.parent is not None
    assert child.parent.span_id == root.context.span_id
    assert root.status.status_code is StatusCode.ERROR
    assert dict(root.attributes or {})["gen_ai.request.seed"] == 7
    assert root.resource.attributes["service.name"] == "toque"
    assert root.end_time == root.start_time + 99_000  # type: ignore[operator]  # both are known


def test_a_trace_that_begins_here_has_no_parent() -> None:
    memory = InMemorySpanExporter()
    sender = SpanSender("http://127.0.0.1:1", exporter=lambda: memory)
    sender.send(*closed(), TraceContext("a" * 32, "b" * 16, sampled=True), {})
    sender.stop()
    assert memory.get_finished_spans()[-1].parent is None


def test_a_collector_gets_them_over_http() -> None:
    with collector() as received:
        sender = SpanSender(received.url)
        for number in range(3):
            sender.send(*closed(number), TRACE, {})
        sender.stop()
        spans = received.spans()
        assert set(received.paths) == {"/v1/traces"}
        assert len(spans) == 6
        assert {span.trace_id.hex() for span in spans} == {TRACE.trace_id}
        assert {span.name for span in spans} == {"text_completion m", "attempt m-0.1"}


class Stuck(SpanExporter):
    """A collector that does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.answers.wait(200)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        return


def test_a_collector_that_does_not_answer_delays_nobody() -> None:
    stuck = Stuck()
    sender = SpanSender("http://127.0.0.1:1", exporter=lambda: stuck)
    started = time.perf_counter()
    for number in range(MAX_WAITING + 200):
        sender.send(*closed(number), TRACE, {})
    assert time.perf_counter() - started < 100  # it does not answer before
    stuck.answers.set()
    sender.stop()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        SpanSender(endpoint)


def test_without_the_extra_the_setting_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from toque.monitor.span_sender import SpanSender\n"
        "SpanSender('http://localhost:4318')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'toque[otel]'" in done.stderr


def test_nothing_is_imported_before_the_first_request() -> None:
    code = (
        "import sys\nfrom toque.monitor.span_sender import SpanSender\nSpanSender('http://localhost:4318')\n"
        "sys.exit(', '.join(m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'requests'))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_flood_of_refusals_leaves_room_for_the_answered() -> None:
    stuck = Stuck()
    sender = SpanSender("http://127.0.0.1:1", exporter=lambda: stuck)
    sender._started = True  # nobody takes anything out
    refusal = Refusal("/v1/completions", 429, "rate_limit_exceeded", "mine", 1, 2)
    for _ in range(MAX_WAITING):
        sender.refused(refusal, TRACE)
    assert sender.dropped == MAX_WAITING // 2
    for number in range(MAX_WAITING // 2):
        sender.send(*closed(number), TRACE, {})
    assert sender.dropped == MAX_WAITING // 2
