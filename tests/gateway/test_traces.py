"""A request's spans from the gateway: in the caller's trace, under the conventions' names, without anybody's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

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
