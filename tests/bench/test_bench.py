"""The load generator against a server with a script: what it counts, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from toque.bench.client import Record, Target, chat
from toque.bench.report import Percentiles, Run, summarize
from toque.bench.slo import Slo
from toque.errors import ConfigError


class Script:
    """Answers every request with ``tokens`` events, ``gap`` seconds apart, cut into ``piece`` bytes a packet."""

    def __init__(self, tokens: int = 3, gap: float = 0.0, piece: int = 1 << 16, status: int = 200) -> None:
        self.tokens, self.gap, self.piece, self.status = tokens, gap, piece, status
        self.body: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.open = self.most = 0
        self.tail = b""  # instead of the usage and [DONE]
        self.hang_up = False
        self.tasks: list[asyncio.Task[None] | None] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.talk(reader, writer)
        except ConnectionError:
            pass  # the client has left
        finally:
            self.open -= 1
            writer.close()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        self.heads.append(head)
        self.body.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {self.status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if self.status != 200:
            await self.send(writer, b'{"error": {"message": "too busy"}}')
        else:
            role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            await self.send(writer, b"data: " + json.dumps(role).encode() + b"\n\n: keep-alive\n\n")
            for i in range(self.tokens):
                await asyncio.sleep(self.gap)
                event = {"choices": [{"delta": {"content": f"t{i}"}}]}
                await self.send(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            usage = {
                "prompt_tokens": 7,
                "completion_tokens": self.tokens,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
            await self.send(writer, self.tail or end)
        if not self.hang_up:
            writer.write(b"0\r\n\r\n")

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), self.piece):
            part = data[start : start + self.piece]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[Target]:
    server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("127.0.0.1", port, "/v1/", "m", "secret")
        for task in script.tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*script.tasks, return_exceptions=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
async def test_a_request_is_what_was_asked_for_and_its_answer_is_counted(piece: int) -> None:
    script = Script(tokens=5, piece=piece)
    async with served(script) as target:
        record = await chat(target, "hello", 5)
    assert record.ok
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (7, 4, 5)
    assert len(record.arrivals) == 5  # neither the role nor the comment is a token
    assert record.sent < record.first == record.arrivals[0] <= record.done
    assert record.arrivals == sorted(record.arrivals)
    assert "Authorization: Bearer secret" in script.heads[0]
    body = script.body[0]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (5, True, True)


async def test_gaps_between_tokens_are_measured() -> None:
    async with served(Script(tokens=4, gap=0.03)) as target:
        record = await chat(target, "hello", 4)
    report = summarize([Run([record])])
    assert 0.025 < report.itl.p50 < 0.2
    assert report.ttft.p50 >= 0.029
    assert report.e2e.p50 >= 0.119


async def test_failures_are_told_by_kind_and_never_raised() -> None:
    def ending(tail: bytes, hang_up: bool = False) -> Script:
        script = Script()
        script.tail, script.hang_up = tail, hang_up
        return script

    for script, kind, word in (
        (Script(status=429), "HTTP 429", "too busy"),
        (ending(b'data: {"error": {"message": "the replica died"}}\n\n'), "stream", "the replica died"),
        (ending(b": nothing\n\n", hang_up=True), "closed", "closed"),
        (ending(b"data: {not json\n\n"), "protocol", "bad event"),
        (ending(b'data: {"choices": 5}\n\n'), "protocol", "bad event"),
    ):
        async with served(script) as target:
            record = await chat(target, "hello", 3)
        assert (record.ok, record.kind) == (False, kind)
        assert word in record.error
    refused = await chat(replace(target, port=1), "hello", 3)
    assert (refused.ok, refused.kind) == (False, "connect")
    async with served(Script(tokens=100, gap=0.05)) as target:
        assert (await chat(target, "hello", 3, timeout_s=0.1)).kind == "timeout"


async def test_a_peer_that_speaks_no_http_is_a_failure_too() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        record = await chat(Target("127.0.0.1", server.sockets[0].getsockname()[1], "/v1/", "m"), "hello", 3)
    assert record.kind == "protocol"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_spellings_of_event_streams_that_servers_use(newline: bytes) -> None:
    """Line ends of either kind, no space after the colon, reasoning and tool calls as text, no usage at all."""
    events = [
        b'data:{"choices":[{"delta":{"reasoning_content":"hm"}}],"usage":null}',
        b"event: message" + newline + b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}',
        b'data: {"choices":[{"index":0,"text":"a"}]}',
        b'data: {"choices":[{"delta":{"content":null},"finish_reason":"stop"}]}',
        b"data: [DONE]",
    ]
    script = Script(tokens=0)
    script.tail = b"".join(e + 2 * newline for e in events)
    async with served(script) as target:
        record = await chat(target, "hello", 3)
    assert record.ok
    assert (record.completion_tokens, record.from_usage) == (3, False)  # counted by events
    assert summarize([Run([record])]).tokens_from == "events"


def test_a_report_equals_the_arithmetic() -> None:
    def record(planned: float, sent: float, arrivals: list[float], tokens: int, kind: str = "") -> Record:
        first = arrivals[0] if arrivals else 0.0
        done = planned + 1
        return Record(planned, sent, first, done, arrivals, 10, 2, tokens, True, 200, kind, kind and "no")

    records = [
        record(0.0, 0.125, [0.5, 0.75], 2),
        record(1.0, 1.0, [1.25, 1.5, 1.75], 5),
        record(2.0, 2.0, [], 0, "timeout"),
    ]
    report = summarize([Run(records, 1.5)], Slo(ttft=0.4, itl=0.25))
    assert (report.requests, report.failed, report.errors) == (3, 1, {"timeout": 1})
    assert report.messages == ("timeout: no",)
    assert (report.seconds, report.in_flight, report.offered_per_second) == (3.0, 1, 1.5)
    assert report.output_tokens_per_second == pytest.approx(7 / 3)
    assert report.total_tokens_per_second == pytest.approx(27 / 3)
    assert report.requests_per_second == pytest.approx(2 / 3)
    assert (report.prompt_tokens, report.cached_tokens, report.tokens_from) == (20, 4, "usage")
    assert (report.ttft.p50, report.ttft.p99, report.ttft.mean) == (0.25, 0.5, 0.375)
    assert (report.ttft_since_sent.p50, report.ttft_since_sent.p99) == (0.25, 0.375)
    assert (report.send_delay.mean, report.send_delay.p99) == (0.125 / 3, 0.125)
    assert (report.itl.mean, report.itl.p99) == (0.25, 0.25)
    assert (report.tpot.p50, report.tpot.p99) == (
        0.125,
        0.25,
    )  # 0.5 s for four tokens in two events; 0.25 s for one
    assert (report.e2e.p50, report.e2e_since_sent.p50) == (1.0, 0.875)
    assert report.goodput is not None  # the first is late, the last failed
    assert (report.goodput.met, report.goodput.share) == (1, pytest.approx(1 / 3))
    assert report.goodput.requests_per_second == pytest.approx(1 / 3)
    assert json.loads(json.dumps(report.as_dict()))["ttft"]["p95"] == 0.5
    nothing = summarize([])
    assert (nothing.seconds, nothing.requests_per_second, nothing.ttft.p50) == (0.0, 0.0, 0.0)


def test_repeats_add_up() -> None:
    def run(shift: float, tokens: int) -> Run:
        return Run([Record(shift, shift, shift + 0.5, shift + 1, [shift + 0.5], 1, 0, tokens, True, 200)])

    report = summarize([run(0, 10), run(1000, 20)])  # the time between two repeats is nobody's
    assert (report.seconds, report.output_tokens_per_second, report.requests) == (2.0, 15.0, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 21, 99, 100, 101])
def test_percentiles_are_nearest_ranks(count: int) -> None:
    """Against the definition: the smallest value that at least so many percent are not above."""
    values = [float((i * 37) % count) for i in range(count)]
    found = Percentiles.of(values)
    for percent, value in ((50, found.p50), (95, found.p95), (99, found.p99)):
        slow = min(v for v in values if 100 * sum(w <= v for w in values) >= percent * count)
        assert value == slow
    assert found.mean == pytest.approx(sum(values) / count)


def test_objectives() -> None:
    assert Slo.parse("ttft=500ms, itl=1.5s,e2e=200us") == Slo(ttft=0.5, itl=1.5, e2e=0.0002)
    assert str(Slo.parse("tpot=50ms")) == "tpot=50ms"
    for wrong in (
        "ttft",
        "ttft=5",
        "ttft=0ms",
        "speed=5ms",
        "ttft=5ms,ttft=6ms",
        "",
        "ttft=-1ms",
        "ttft=5ms,",
    ):
        with pytest.raises(ConfigError, match="--slo"):
            Slo.parse(wrong)
    answered = Record(0.0, 0.0, 0.1, 0.5, [0.1, 0.2, 0.5], 1, 0, 3, True, 200)
    for slo, met in (
        (Slo(), True), (Slo(ttft=0.1), True), (Slo(ttft=0.09), False), (Slo(tpot=0.2), True), (Slo(tpot=0.19), False),
        (Slo(itl=0.31), True), (Slo(itl=0.29), False), (Slo(e2e=0.5, itl=1), True), (Slo(e2e=0.4, itl=1), False),
    ):  # fmt: skip
        assert slo.met_by(answered) is met, slo
    assert not Slo().met_by(replace(answered, kind="timeout"))


def test_addresses() -> None:
    path = "/v1/"
    for url, expected in (
        ("http://h:81", ("h", 81, path, False)),
        ("h:81", ("h", 81, path, False)),
        ("http://h/v1/", ("h", 80, path, False)),
        ("https://h/base/v1", ("h", 443, "/base" + path, True)),
        ("http://[::1]:9", ("::1", 9, path, False)),
    ):
        target = Target.parse(url, "m")
        assert (target.host, target.port, target.base, target.tls) == expected
    for url in ("ftp://h", "http://", "http://h:port", "http://h:99999", ""):
        with pytest.raises(ConfigError, match="--url"):
            Target.parse(url, "m")
