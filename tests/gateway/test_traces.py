"""A request's spans from the gateway: in the caller's trace, under the conventions' names, without anybody's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from toque.errors import UnavailableError
from toque.monitor.span_sender import SpanSender
from toque.routing.base import OnRoute, RouteEvent, RouteKind
from toque.routing.fake import FakeEngineClient
from toque.types import EngineRequest, SequenceOutput

from .world import Plan, World, spoken, world

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Moved(FakeEngineClient):
    """Tells of a replica that died and another that answered, as a pool does."""

    def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        assert on_route is not None
        on_route(RouteEvent(RouteKind.ROUTED, 0.0, "parrot-0", 1))
        on_route(RouteEvent(RouteKind.RETRIED, 0.0, "parrot-1", 4, reason="it died"))
        return super().generate(request)


FORCED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
FLAGS = {"tracing.endpoint": "http://127.0.0.1:1"}


@asynccontextmanager
async def traced(
    plan: Plan | None = None, **flags: object
) -> AsyncIterator[tuple[World, InMemorySpanExporter]]:
    """The spans are there once the world is closed."""
    plan = plan or Plan()
    memory = InMemorySpanExporter()
    async with world(Plan(**{**vars(plan), "flags": {**FLAGS, **plan.flags, **flags}})) as made:
        made.gateway.spans = SpanSender("http://127.0.0.1:1", exporter=lambda: memory)
        yield made, memory
        await asyncio.to_thread(made.gateway.spans.stop)
        made.gateway.spans = None


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def servers(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name.partition(" ")[0] in ("chat", "text_completion")]


async def ask(w: World, sampled: str | None = "01", **fields: Any) -> Any:
    headers = {} if sampled is None else {"traceparent": f"00-{TRACE}-{PARENT}-{sampled}"}
    body = {"model": "parrot", "messages": [{"role": "user", "content": "canary"}], **fields}
    return await w.client.post("/v1/chat/completions", json=body, headers=headers)


async def test_an_answer_is_a_server_span_in_the_callers_trace() -> None:
    async with traced(Plan(script=spoken("words", cached_tokens=2))) as (w, memory):
        answer = await ask(w, temperature=0.5, max_tokens=50, seed=3)
        streamed = await ask(w, stream=True)
        assert streamed.status_code == 200
    first, second = servers(memory.get_finished_spans())
    told = attributes(first)
    usage = answer.json()["usage"]
    assert first.context is not None
    assert first.parent is not None
    assert answer.headers["traceparent"] == f"00-{TRACE}-{first.context.span_id:016x}-01"
    assert f"{first.parent.span_id:016x}" == PARENT
    assert told["gen_ai.response.id"] == answer.json()["id"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 50
    assert told["gen_ai.request.seed"] == 3
    assert told["toque.request.id"] == answer.headers["x-request-id"]
    assert attributes(second)["gen_ai.request.stream"] is True
    assert "canary" not in "".join(span.to_json() for span in memory.get_finished_spans())


async def test_the_caller_decides_and_else_the_ratio() -> None:
    async with traced(**{"tracing.sample_ratio": 0.0}) as (w, memory):
        await ask(w, "00")
        await ask(w, None)
        await ask(w, "01")
    (span,) = servers(memory.get_finished_spans())
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE


async def test_where_a_choice_went_is_under_the_request() -> None:
    async with traced() as (w, memory):
        w.deployment.client = w.deployment.current.client = Moved(w.engine.script)
        await ask(w)
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"chat parrot", "attempt parrot-0.1", "attempt parrot-1.4"}
    assert attributes(spans["attempt parrot-1.4"])["toque.route.reason"] == "it died"
    root = spans["chat parrot"].context
    assert root is not None
    for name in ("attempt parrot-0.1", "attempt parrot-1.4"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.span_id


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


REFUSED: dict[str, tuple[dict[str, object], Any, dict[str, str], int, str]] = {
    "a body that is no JSON": ({}, b'{"canary', {}, 400, "invalid_json"),
    "a value out of range": (
        {},
        {"model": "parrot", "messages": [{"role": "user", "content": "canary"}], "temperature": -3},
        {},
        400,
        "invalid_request_error",
    ),
    "an unknown model": (
        {},
        {"model": "canary", "messages": [{"role": "user", "content": "x"}]},
        {},
        404,
        "model_not_found",
    ),
    "a wrong key": ({"auth.api_keys": ("sk-right",)}, {}, bearer("sk-canary"), 401, "invalid_api_key"),
    "too large": ({"limits.max_body_bytes": 2_000}, b"canary" * 1_000, {}, 413, "payload_too_large"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_a_server_span_with_its_status(case: str) -> None:
    flags, body, headers, status, code = REFUSED[case]
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {**headers, "content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with traced(**flags) as (w, memory):
        answer = await w.client.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == status
    (span,) = memory.get_finished_spans()
    assert span.context is not None
    assert span.parent is not None
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.kind, span.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    assert attributes(span)["http.response.status_code"] == status
    assert attributes(span)["error.type"] == code
    assert attributes(span)["toque.request.id"] == answer.headers["x-request-id"]
    assert "canary" not in span.to_json()
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < span.end_time - span.start_time < 60e9


async def test_a_limit_and_an_overload_are_told_with_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"auth.api_keys": ("sk-right",), "limits.requests_per_minute": 1}
    async with traced(**keys) as (w, memory):
        w.client.headers.update(bearer("sk-right"))
        assert (await ask(w)).status_code == 200
        assert (await ask(w)).status_code == 429
    (_, limited) = servers(memory.get_finished_spans())
    assert attributes(limited)["error.type"] == "rate_limit_exceeded"
    assert attributes(limited)["gen_ai.request.model"] == "parrot"
    async with traced() as (w, memory):
        w.deployment.admission.requests = w.deployment.admission.max_requests
        assert (await ask(w)).status_code == 429
        w.deployment.admission.requests = 0

        def stopping(*_: object) -> None:
            raise UnavailableError("it stops")

        monkeypatch.setattr(w.deployment.admission, "enter", stopping)
        assert (await ask(w)).status_code == 503
    full, stopped = servers(memory.get_finished_spans())
    assert [attributes(span)["error.type"] for span in (full, stopped)] == [
        "queue_full",
        "service_unavailable",
    ]
    assert full.status.status_code is StatusCode.UNSET
    assert stopped.status.status_code is StatusCode.ERROR
    assert [attributes(span)["gen_ai.request.model"] for span in (full, stopped)] == ["parrot"] * 2


async def test_refusals_that_nobody_records_have_no_spans() -> None:
    async with traced(**{"tracing.sample_ratio": 0.0}) as (w, memory):
        assert (await ask(w, "00", model="other")).status_code == 404
        assert (await ask(w, None, model="other")).status_code == 404
        assert (await w.client.get("/favicon.ico")).status_code == 404
        assert (await w.client.get("/favicon.ico", headers=FORCED)).status_code == 404
        assert (await w.client.get("/v1/chat/completions", headers=FORCED)).status_code == 405
    assert memory.get_finished_spans() == ()
    async with world(Plan()) as w:  # tracing is off
        assert (await ask(w, model="other")).status_code == 404
        assert w.gateway.spans is None
