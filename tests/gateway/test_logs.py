"""What a gateway logs: each request with its ids, and nothing that anybody wrote or keeps secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from toque.errors import EngineError
from toque.monitor.log_format import configure_logs
from toque.routing.fake import Script

from .world import Plan, World, spoken, world

CANARY, KEY = "canary-7f3a", "sk-secret-91c2"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def everything() -> Iterator[io.StringIO]:
    """All that any logger says, at its most talkative."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logs("debug", "json", stream)
    yield stream
    root.handlers[:], root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def everything_that_goes_wrong(w: World) -> None:
    """Requests that carry the canary everywhere, through every way out that a request has."""
    w.client.headers["authorization"] = f"Bearer {KEY}"
    messages = [{"role": "user", "content": CANARY}]
    await w.chat(messages=messages)
    await w.chat(messages=messages, stream=True)
    await w.chat(messages=messages, temperature=CANARY)
    await w.chat(messages=[{"role": CANARY, "content": CANARY}])
    await w.chat(messages=messages, model=CANARY)
    await w.complete(prompt=CANARY * 200)
    await w.client.post(f"/{CANARY}?{CANARY}", json={"x": CANARY})
    half = f'{{"prompt": "{CANARY}"'.encode()
    await w.client.post("/v1/completions", content=half, headers={"content-type": "application/json"})
    await w.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"})
    body = {"model": "parrot", "prompt": CANARY}
    await w.client.post("/v1/completions", json=body, headers={"idempotency-key": CANARY})
    for error in (EngineError("the engine failed"), RuntimeError("unexpected")):
        w.engine.script = Script(b"abc", error=error, fail_at=1)  # type: ignore[arg-type]  # an unexpected one, too
        await w.chat(messages=messages)
        await w.chat(messages=messages, stream=True)


async def test_no_prompt_and_no_key_is_ever_logged(everything: io.StringIO) -> None:
    async with world(Plan(script=spoken(CANARY), flags={"auth.api_keys": KEY})) as w:
        await everything_that_goes_wrong(w)
    said = everything.getvalue()
    assert len(lines(everything)) >= 12
    assert any(line["level"] == "error" and "exception" in line for line in lines(everything))
    for secret in (CANARY, KEY):
        assert secret not in said, [line for line in said.splitlines() if secret in line]


async def test_prompts_are_logged_where_the_operator_asks_for_them(everything: io.StringIO) -> None:
    flags = {"auth.api_keys": KEY, "server.log_prompts": True}
    async with world(Plan(flags=flags)) as w:
        w.client.headers["authorization"] = f"Bearer {KEY}"
        await w.chat(messages=[{"role": "user", "content": CANARY}])
    assert any(CANARY in line.get("body", "") for line in lines(everything))
    assert KEY not in everything.getvalue()


async def test_each_request_is_a_line_with_its_ids(everything: io.StringIO) -> None:
    async with world() as w:
        answer = await w.client.post(
            "/v1/completions",
            json={"model": "parrot", "prompt": "hi"},
            headers={"x-request-id": "mine", "traceparent": PARENT},
        )
        await w.client.get("/v1/models")
    (line, other) = [line for line in lines(everything) if line["logger"] == "toque.gateway"]
    assert (line["request_id"], line["trace_id"]) == ("mine", PARENT.split("-")[1])
    assert (line["method"], line["endpoint"]) == ("POST", "/v1/completions")
    assert (line["status"], line["model"]) == (200, "parrot")
    assert 0 < line["seconds"] < 10
    assert "trace_id" not in other
    assert "traceparent" not in answer.headers  # nothing is recorded here


async def test_the_answer_says_whose_trace_it_is_where_spans_are_recorded() -> None:
    async with world(Plan(flags={"tracing.endpoint": "http://127.0.0.1:1"})) as w:
        answer = await w.client.post(
            "/v1/completions", json={"model": "parrot", "prompt": "hi"}, headers={"traceparent": PARENT}
        )
        version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", PARENT.split("-")[1], "01")
        assert span_id != PARENT.split("-")[2]
        assert (await w.client.get("/health")).headers["traceparent"].split("-")[1] != trace_id
