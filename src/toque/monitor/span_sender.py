"""Spans to an OpenTelemetry collector, over OTLP/HTTP. The one file that imports opentelemetry (extra ``[otel]``).

Requests only note moments while they run; spans are built, in a thread, once they are over.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from toque import __version__
from toque.errors import ConfigError
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.spans import Refusal, Span, Value, spans_of
from toque.monitor.trace_context import TraceContext
from toque.monitor.trail import Trail

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("toque.tracing")

MAX_WAITING = 4_096  # requests; what is more is dropped, and counted
FLUSH_S = 3.0
Closed = tuple[Callable[[], Span], TraceContext]


class SpanSender:
    """Sends the spans of closed requests to ``endpoint``. `send` and `refused` cost a microsecond and never wait.

    ConfigError when the extra is not installed or the endpoint is no address. A collector that is away costs spans,
    never requests; headers, certificates and timeouts come from the exporter's own ``OTEL_EXPORTER_OTLP_*`` variables.
    """

    def __init__(self, endpoint: str, *, exporter: Callable[[], SpanExporter] | None = None) -> None:
        """``exporter`` makes another one than OTLP's, for tests."""
        self._endpoint = _traces_url(endpoint)
        if exporter is None and not all(
            map(_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto"))
        ):
            raise ConfigError(
                "tracing.endpoint needs OpenTelemetry: pip install 'toque[otel]'", param="tracing.endpoint"
            )
        self._exporter = exporter or self._otlp
        self._waiting: queue.Queue[Closed | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="toque-spans", daemon=True)
        self._started = False
        self.dropped = 0

    def send(self, trail: Trail, row: UsageRecord, trace: TraceContext, asked: Mapping[str, Value]) -> None:
        """The spans of an admitted request that is over."""
        self._put((partial(spans_of, trail, row, asked), trace))

    def refused(self, refusal: Refusal, trace: TraceContext) -> None:
        """The span of a request that was not admitted. A flood of these leaves half of the room to the others."""
        if self._waiting.qsize() < MAX_WAITING // 2:
            self._put((refusal.span, trace))
        else:
            self._drop()

    def _put(self, closed: Closed) -> None:
        if not self._started:
            self._started = True
            self._thread.start()  # only now: importing the library takes half a second
        try:
            self._waiting.put_nowait(closed)
        except queue.Full:
            self._drop()

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("spans are dropped: they come faster than they are sent")

    def stop(self) -> None:
        """Send what is left, for a few seconds at most."""
        if self._started:
            self._waiting.put(None)
            self._thread.join(2 * FLUSH_S)

    def _otlp(self) -> SpanExporter:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(self._endpoint)

    def _run(self) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(self._exporter(), schedule_delay_millis=1_000)
        spell = Spelling()
        while (closed := self._waiting.get()) is not None:
            try:
                make, trace = closed
                for span in spell(make(), trace):
                    processor.on_end(span)
            except Exception:  # this thread must outlive whatever a trail or a library comes up with
                log.exception("the spans of a request cannot be sent")
        processor.force_flush(int(FLUSH_S * 1e3))
        processor.shutdown()  # type: ignore[no-untyped-call]  # the library has not annotated it


class Spelling:
    """Our spans as the library's."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource.create({"service.version": __version__})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win; what nobody has named is called by what it is.
        if str(self._resource.attributes["service.name"]).startswith("unknown_service"):
            self._resource = self._resource.merge(Resource({"service.name": "toque"}))
        self._scope = InstrumentationScope("toque", __version__)

    def __call__(self, root: Span, trace: TraceContext) -> list[ReadableSpan]:
        """Parents come after their children, as spans end."""
        found: list[ReadableSpan] = []
        self._spell(root, trace, trace.span_id, trace.parent_id, found)
        return found

    def _spell(
        self, span: Span, trace: TraceContext, span_id: str, parent_id: str, found: list[ReadableSpan]
    ) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        state = TraceState.from_header([trace.state]) if trace.state else TraceState()

        def context(named: str, remote: bool) -> SpanContext:
            return SpanContext(
                int(trace.trace_id, 16), int(named, 16), remote, TraceFlags(TraceFlags.SAMPLED), state
            )

        for child in span.children:
            self._spell(child, trace, secrets.token_hex(8), span_id, found)
        outermost = span_id == trace.span_id
        found.append(
            ReadableSpan(
                name=span.name,
                context=context(span_id, remote=False),
                parent=context(parent_id, remote=outermost) if parent_id else None,
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(name, attributes, at) for name, at, attributes in span.events],
                kind=SpanKind.SERVER if outermost else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=self._scope,
            )
        )


def _traces_url(endpoint: str) -> str:
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(
            f"tracing.endpoint is a collector's address such as http://localhost:4318, got {endpoint[:60]!r}",
            param="tracing.endpoint",
        )
    return endpoint if address.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
