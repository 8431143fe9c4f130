"""Who leaves, who waits, who is told to go: cancellation, admission, loading, deadlines, the drain."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from toque.errors import ConfigError, EngineError
from toque.gateway.http import exchange, respond
from toque.gateway.listen import bind
from toque.gateway.server import GatewayServer
from toque.routing.base import ReplicaState
from toque.routing.fake import Script

from .world import FIRST_PIECE, Plan, World, build, events, served, soon, spoken, texts, world

ENDLESS = Script(list(b"a" * 400), delay_s=0.02, hold=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reset", [True, False])
async def test_work_stops_when_the_client_leaves(stream: bool, n: int, reset: bool) -> None:
    """Field case BR-048: closing with FIN or RST, streamed or not, one choice or several."""
    async with served(Plan(script=ENDLESS)) as w:
        host, port = w.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {"model": "parrot", "prompt": "x", "max_tokens": 400, "stream": stream, "n": n}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await soon(lambda: w.engine.running == n)
        await asyncio.sleep(0.05)
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await soon(lambda: w.engine.running == 0)  # it would hold for ever
        generated = w.engine.generated_tokens
        await asyncio.sleep(0.1)
        assert w.engine.generated_tokens == generated
        assert len(w.engine.aborted) == n
        admission = w.deployment.admission
        await soon(lambda: (admission.requests, admission.tokens) == (0, 0))
        left = 'toque_requests_total{endpoint="/v1/completions",status="499"} 1.0'
        await soon(lambda: left in w.gateway.metrics.exposition().decode())


async def test_many_ordinary_requests_leave_nothing_behind(parrot: World) -> None:
    for _ in range(50):
        assert (await parrot.chat()).status_code == 200
    assert (
        parrot.engine.running,
        parrot.deployment.admission.requests,
        parrot.deployment.admission.tokens,
    ) == (0, 0, 0)
    assert len(asyncio.all_tasks()) <= 2


async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    script = Script(b"a", first_delay_s=0.2)
    async with world(Plan(script=script, flags={"limits.max_queued_requests": 2})) as w:
        answers = await asyncio.gather(*(w.chat() for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
                assert answer.json()["error"]["type"] == "rate_limit_error"
        assert len(w.engine.requests) == 2
        assert (await w.chat()).status_code == 200


async def test_queued_tokens_are_bounded_too() -> None:
    script = Script(b"a", first_delay_s=0.2)
    async with world(Plan(script=script, flags={"limits.max_queued_tokens": 100})) as w:
        first = asyncio.create_task(w.complete(prompt=[97] * 300))  # alone, the largest is let in
        await soon(lambda: bool(w.engine.requests))
        assert (await w.complete()).status_code == 429
        assert (await first).status_code == 200
        assert (await w.complete()).status_code == 200


async def test_streams_that_have_begun_do_not_fill_the_queue() -> None:
    async with (
        served(Plan(script=ENDLESS, flags={"limits.max_queued_requests": 1})) as w,
        w.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "parrot", "prompt": "x", "max_tokens": 400, "stream": True},
        ) as answer,
    ):
        await anext(answer.aiter_bytes())
        w.engine.script = spoken("ok")
        assert (await w.complete()).status_code == 200


async def test_a_loading_model_is_waited_for() -> None:
    async with world() as w:
        w.engine.state, w.engine.reason = ReplicaState.STARTING, "loading weights"
        assert (await w.client.get("/live")).status_code == 200
        assert (await w.client.get("/ready")).status_code == 503
        health = await w.client.get("/health")
        assert health.status_code == 503
        assert health.json()["models"] == [
            {"name": "parrot", "state": "starting", "reason": "loading weights"}
        ]
        assert (await w.client.get("/v1/models")).json()["data"] == []
        assert (await w.client.get("/v1/models/parrot")).status_code == 503
        waiting = asyncio.create_task(w.chat())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await w.chat(temperature=9)).status_code == 400  # what is wrong is told at once
        w.engine.state = ReplicaState.READY
        assert (await waiting).status_code == 200
        assert (await w.client.get("/ready")).status_code == 200


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DEAD])
async def test_a_model_that_does_not_come_is_503(state: ReplicaState) -> None:
    """Field case BR-074."""
    async with world(Plan(flags={"limits.load_wait_s": 0.1})) as w:
        w.engine.state, w.engine.reason = state, "the file is damaged"
        answer = await w.chat()
        assert answer.status_code == 503
        assert "the file is damaged" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert (await w.client.get("/live")).status_code == 200


async def test_a_model_without_progress_is_not_ready_but_still_asked(parrot: World) -> None:
    parrot.engine.state, parrot.engine.reason = ReplicaState.DEGRADED, "no step finished for 4 s"
    assert (await parrot.client.get("/ready")).status_code == 503
    assert (await parrot.client.get("/health")).json()["models"][0]["reason"] == "no step finished for 4 s"
    assert (await parrot.client.get("/v1/models")).json()["data"]
    assert (await parrot.chat()).status_code == 200


async def test_a_gateway_without_models_is_not_ready() -> None:
    from toque.config import load_settings
    from toque.gateway.app import create_app

    app = create_app({}, load_settings(environ={}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
    app.state.gateway.close()


async def test_a_deadline_ends_a_request_and_its_work() -> None:
    async with world(Plan(script=ENDLESS)) as w:
        answer = await w.chat(timeout=0.1)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        stream = events(await w.chat(timeout=1.0, stream=True))
        assert "".join(texts(stream[:-1])).startswith("a")
        assert stream[-1]["error"]["code"] == "deadline_exceeded"
        assert w.engine.running == 0
        assert w.engine.requests[0].deadline is not None
        assert abs(w.engine.requests[0].deadline - time.time()) < 5


async def test_a_waiting_stream_keeps_its_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "KEEP_ALIVE_S", 0.05)
    async with served(Plan(script=spoken("ok", first_delay_s=0.3))) as w:
        answer = await w.chat(stream=True)
        assert answer.content.startswith(b": waiting\n\n")
        assert answer.content.count(b": waiting\n\n") >= 3
        assert "".join(texts(events(answer))) == "ok"
        w.engine.script = Script(first_delay_s=0.2, error=EngineError("no"))
        late = await w.chat(stream=True)
        assert late.status_code == 200
        assert events(late)[-1]["error"]["message"] == "no"


async def test_a_large_prompt_is_tokenized_beside_the_streams() -> None:
    async with world(Plan(context=10**6, script=spoken("abcdefghij", delay_s=0.01))) as w:
        inline = w.deployment.current.tokenizer.encode
        threads: list[bool] = []

        def encode(text: str, *, add_special: bool) -> list[int]:
            try:
                asyncio.get_running_loop()
                threads.append(False)
            except RuntimeError:
                threads.append(True)
            return inline(text, add_special=add_special)

        w.deployment.current.tokenizer.encode = encode  # type: ignore[method-assign]
        assert (await w.complete(prompt="x" * 100)).status_code == 200
        assert (await w.complete(prompt="x" * 100_000)).status_code == 200
        assert threads == [False, True]


class Stopping:
    """A served world whose server a test stops itself."""

    def __init__(self, plan: Plan) -> None:
        plan = Plan(**{**vars(plan), "flags": {"server.port": 0, **plan.flags}})
        self.engine, self.deployment, settings, self.app = build(plan)
        self.listener = bind(settings.server, False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = GatewayServer(self.app, settings.server, settings.limits.max_header_bytes)

    async def __aenter__(self) -> Stopping:
        self.task = asyncio.create_task(self.server.serve([self.listener]))
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60)
        await soon(lambda: self.server.started)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.aclose()
        if not self.task.done():
            self.server.stop()
            self.server.stop()
        await self.task
        self.app.state.gateway.close()

    async def stream(self) -> list[Any]:
        body = {"model": "parrot", "prompt": "x", "max_tokens": 400, "stream": True}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            return events(await client.post("/v1/completions", json=body))


async def test_the_drain_finishes_open_streams_and_tells_idle_connections() -> None:
    """Field case BR-076, for one gateway."""
    async with Stopping(Plan(script=spoken("x" * 30, delay_s=0.02))) as s:
        assert (await s.client.get("/ready")).status_code == 200
        streams = [asyncio.create_task(s.stream()) for _ in range(4)]
        await soon(lambda: s.engine.running == 4)
        s.server.stop()
        late = await s.client.get("/ready")  # on the connection that was kept alive
        assert late.status_code == 503
        assert late.json()["status"] == "draining"
        assert late.headers["connection"] == "close"
        for stream in await asyncio.gather(*streams):
            assert "".join(texts(stream)) == "x" * 30
            assert stream[-1] == "[DONE]"
        await asyncio.wait_for(s.task, 20)
        with pytest.raises(httpx.ConnectError):
            await s.client.get("/live")


async def test_a_request_on_an_old_connection_is_answered_while_draining() -> None:
    async with Stopping(Plan()) as s:
        assert (await s.client.get("/live")).status_code == 200
        s.server.stop()
        answer = await s.client.post("/v1/completions", json={"model": "parrot", "prompt": "x"})
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        async with asyncio.timeout(20):  # not the grace of 30 s
            await s.task


async def test_what_does_not_finish_within_the_grace_ends_in_an_error_event() -> None:
    async with Stopping(Plan(script=ENDLESS, flags={"server.grace_s": 0.3})) as s:
        stream = asyncio.create_task(s.stream())
        await soon(lambda: s.engine.generated_tokens > 2)
        s.server.stop()
        found = await stream
        assert found[-1]["error"]["code"] == "service_unavailable"
        assert found[-1]["error"]["type"] == "overloaded_error"
        await asyncio.wait_for(s.task, 20)
        assert s.engine.running == 0


async def test_a_second_signal_does_not_wait() -> None:
    async with Stopping(Plan(script=ENDLESS)) as s:
        stream = asyncio.create_task(s.stream())
        await soon(lambda: s.engine.running == 1)
        s.server.stop()
        s.server.stop()
        await asyncio.wait_for(s.task, 20)
        assert (await stream)[-1]["error"]["code"] == "service_unavailable"


async def test_an_idle_server_stops_at_once() -> None:
    async with Stopping(Plan()) as s:
        s.server.stop()
        async with asyncio.timeout(20):  # not the grace of 30 s
            await s.task


def test_listening_beyond_loopback_needs_a_key_or_insecure() -> None:
    from toque.config import load_settings

    server = load_settings({"server.host": "0.0.0.0", "server.port": 0}, environ={}).server
    with pytest.raises(ConfigError, match="insecure"):
        bind(server, has_keys=False)
    bind(server, has_keys=True).close()
    open_server = load_settings(
        {"server.host": "0.0.0.0", "server.port": 0, "server.insecure": True}, environ={}
    ).server
    bind(open_server, has_keys=False).close()


def test_a_port_in_use_is_a_short_error() -> None:
    from toque.config import load_settings

    taken = bind(load_settings({"server.port": 0}, environ={}).server, has_keys=False)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: ") as caught:
        bind(load_settings({"server.port": port}, environ={}).server, has_keys=False)
    assert caught.value.param == "server.port"
    taken.close()


async def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LAST_WORD_S", 0.1)
    pieces = [b"x" * 200_000]
    async with served(Plan(script=Script([FIRST_PIECE] * 400, hold=True), pieces=pieces)) as w:
        host, port = w.url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        body = json.dumps(
            {"model": "parrot", "prompt": "x", "max_tokens": 400, "stream": True, "timeout": 0.4}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await soon(lambda: w.engine.running == 1)
        await soon(lambda: w.engine.running == 0)
        assert w.engine.generated_tokens < 400
        late = 'toque_requests_total{endpoint="/v1/completions",status="504"} 1.0'
        await soon(lambda: late in w.gateway.metrics.exposition().decode())
        client.close()
