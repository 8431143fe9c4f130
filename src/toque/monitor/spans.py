"""A closed request's moments as spans, under the names of OpenTelemetry's conventions for generative AI. Pure.

::

    chat smollm2                              the request, from its arrival to its end
    ├── attempt smollm2-0.1                   a choice on one replica; the next attempt is a retry or a migration
    │   ├── queue                             until the engine gave it a place
    │   ├── prefill                           until its first token; a step's chunk is an event
    │   └── decode                            a preemption begins again with queue
    └── attempt smollm2-1.1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from toque.monitor.ledger.record import Outcome, UsageRecord
from toque.monitor.trail import ROUTES, Moment, Trail, TrailKind

Value = str | bool | int | float | Sequence[str]
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
_FAILED = (Outcome.FAILED.value, Outcome.LOST.value)


@dataclass(slots=True)
class Span:
    """Times in nanoseconds since the epoch. ``error`` is a code; "" for none."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, int, dict[str, Value]]] = field(default_factory=list)
    children: list[Span] = field(default_factory=list)
    error: str = ""


def spans_of(trail: Trail, row: UsageRecord, asked: Mapping[str, Value]) -> Span:
    """The request's span with everything under it. ``asked`` are the attributes of what was asked for."""
    moments = trail.ordered()
    end_us = moments[-1].at_us if moments else row.total_us
    first = next((moment.at_us for moment in moments if moment.kind == TrailKind.FIRST_TOKEN), None)
    operation = OPERATIONS.get(trail.endpoint, "unknown")
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "toque",
        "gen_ai.request.model": trail.model,
        "gen_ai.response.model": trail.model,
        "gen_ai.response.id": trail.request_id,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": row.cached_tokens,
        "http.request.method": "POST",
        "http.route": trail.endpoint,
        "http.response.status_code": row.status,
        "toque.request.id": trail.client_id,
        "toque.device.seconds": row.device_ns / 1e9,
        **asked,
    }
    optional: dict[str, Value] = {
        "gen_ai.response.finish_reasons": row.finish_reason.split(",") if row.finish_reason else "",
        "gen_ai.usage.reasoning.output_tokens": row.reasoning_tokens,
        "toque.model.version": row.version,
        "toque.tenant": trail.tenant,
        "error.type": row.error_code,
    }
    attributes |= {name: value for name, value in optional.items() if value}
    if first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first / 1e6
    span = Span(
        f"{operation} {trail.model}",
        _ns(trail, 0),
        _ns(trail, end_us),
        attributes,
        error=row.error_code if row.outcome in _FAILED else "",
    )
    for moment in moments:
        if moment.kind in (TrailKind.PREPARED, TrailKind.HELD):
            span.events.append((moment.kind, _ns(trail, moment.at_us), _told(moment)))
    for choice in dict.fromkeys(moment.choice for moment in moments if moment.kind in ROUTES):
        span.children += _attempts(trail, [m for m in moments if m.choice == choice], end_us)
    span.children.sort(key=lambda child: child.start_ns)
    return span


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error before it was admitted: neither a row nor a trail tells of it.

    ``model`` is "" where none of that name is served; ``code`` is the error's. Times in nanoseconds since the epoch.
    """

    endpoint: str
    status: int
    code: str
    client_id: str
    start_ns: int
    end_ns: int
    model: str = ""
    tenant: str = ""

    def span(self) -> Span:
        operation = OPERATIONS.get(self.endpoint, "unknown")
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "toque",
            "http.request.method": "POST",
            "http.route": self.endpoint,
            "http.response.status_code": self.status,
            "toque.request.id": self.client_id,
            "error.type": self.code,
        }
        optional: dict[str, Value] = {"gen_ai.request.model": self.model, "toque.tenant": self.tenant}
        attributes |= {name: value for name, value in optional.items() if value}
        # By the conventions for HTTP, what the caller did wrong is no error of the server's span.
        error = self.code if self.status >= 500 else ""
        return Span(f"{operation} {self.model}".strip(), self.start_ns, self.end_ns, attributes, error=error)


def _attempts(trail: Trail, moments: Sequence[Moment], end_us: int) -> Iterator[Span]:
    """One choice's attempts, each with its phases."""
    # A second replica's attempt is one where it won; else it is a moment of the first one's.
    winners = {moment.note for moment in moments if moment.kind == TrailKind.WON}
    starts = [
        i
        for i, moment in enumerate(moments)
        if moment.kind in ROUTES
        and (moment.kind != TrailKind.HEDGED or moment.note.partition(": ")[0] in winners)
    ]
    for number, (begin, until) in enumerate(zip(starts, [*starts[1:], len(moments)], strict=True), 1):
        route, inside = moments[begin], moments[begin + 1 : until]
        replaced = until < len(moments)
        finish = next((m.at_us for m in inside if m.kind == TrailKind.FINISHED), end_us)
        replica, _, reason = route.note.partition(": ")
        attributes: dict[str, Value] = {
            "toque.replica": replica,
            "toque.attempt": number,
            "toque.choice": route.choice,
            "toque.route": route.kind,
        }
        if reason:
            attributes["toque.route.reason"] = reason
        end = moments[until].at_us if replaced else finish
        span = Span(
            f"attempt {replica}",
            _ns(trail, route.at_us),
            _ns(trail, end),
            attributes,
            error=str(moments[until].kind) if replaced else "",
        )
        span.children = list(_phases(trail, route.at_us, inside, end))
        yield span


def _phases(trail: Trail, start_us: int, moments: Sequence[Moment], end_us: int) -> Iterator[Span]:
    if not any(moment.kind == TrailKind.SCHEDULED for moment in moments):
        return  # the replica tells nothing of its steps
    span = Span("queue", _ns(trail, start_us), 0)
    computed_us = start_us  # when the prompt's last chunk was done
    for moment in moments:
        at = _ns(trail, moment.at_us)
        if moment.kind == TrailKind.PREFILL:
            computed_us = moment.at_us
            span.events.append(("chunk", at, _told(moment)))
            continue
        if span.name == "prefill" and moment.kind != TrailKind.SCHEDULED:
            span.end_ns = at if moment.kind == TrailKind.FIRST_TOKEN else _ns(trail, computed_us)
            yield span
            span = Span("decode", span.end_ns, 0)
        if moment.kind in (TrailKind.SCHEDULED, TrailKind.PREEMPTED):
            span.end_ns = at
            yield span
            span = Span("prefill" if moment.kind == TrailKind.SCHEDULED else "queue", at, 0)
            told = _told(moment)
            span.attributes = {f"toque.{name}": value for name, value in told.items()}
    span.end_ns = max(span.start_ns, _ns(trail, end_us))
    yield span


def _told(moment: Moment) -> dict[str, Value]:
    named: dict[str, Value] = {"tokens": moment.tokens, "step": moment.step, "reason": moment.note}
    return {name: value for name, value in named.items() if value}


def _ns(trail: Trail, at_us: int) -> int:
    return (trail.opened_at + at_us) * 1_000
