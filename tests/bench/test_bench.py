"""The load generator against a server with a script: what it counts, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from toque.bench.client import Record, Target, chat
from toque.bench.report import Percentiles, summarize
from toque.bench.run import run
from toque.bench.workload import WORKLOADS, Workload
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
        yield Target("127.0.0.1", port, "/v1/chat/completions", "m", "secret")
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
    report = summarize("w", 1, [record])
    assert 0.025 < report.inter_token.p50 < 0.2
    assert report.ttft.p50 >= 0.029
    assert report.end_to_end.p50 >= 0.119


async def test_failures_are_told_and_never_raised() -> None:
    broken = Script()
    broken.tail = b'data: {"error": {"message": "the replica died"}}\n\n'
    cut = Script()
    cut.tail, cut.hang_up = b": nothing\n\n", True
    for script, word in ((Script(status=429), "too busy"), (broken, "the replica died"), (cut, "closed")):
        async with served(script) as target:
            record = await chat(target, "hello", 3)
        assert not record.ok
        assert word in record.error
    refused = await chat(replace(target, port=1), "hello", 3)
    assert not refused.ok
    assert refused.error
    async with served(Script(tokens=100, gap=0.05)) as target:
        assert "Timeout" in (await chat(target, "hello", 3, timeout_s=0.1)).error


async def test_a_workload_keeps_as_many_in_flight_as_it_says() -> None:
    script = Script(gap=0.01)
    prompts = tuple(f"p{i}" for i in range(9))
    seen: list[int] = []
    async with served(script) as target:
        report = await run(target, Workload("w", prompts, 3, 4), warmup=2, progress=seen.append)
    assert script.most == 4
    sent = [body["messages"][0]["content"] for body in script.body]  # type: ignore[index]
    assert sorted(sent[2:]) == sorted(prompts)  # the first two only warm up
    assert seen == list(range(1, 10))
    assert (report.requests, report.failed, report.output_tokens, report.cached_tokens) == (9, 0, 27, 36)


def test_a_report_equals_the_arithmetic() -> None:
    def record(sent: float, arrivals: list[float], tokens: int, error: str = "") -> Record:
        first = arrivals[0] if arrivals else 0.0
        return Record(sent, first, [*arrivals, sent][0] + 1, arrivals, 10, 2, tokens, 200, error)

    records = [record(0.0, [0.5, 0.75], 2), record(1.0, [1.25, 1.75], 2), record(2.0, [], 0, "no")]
    report = summarize("w", 3, records)
    assert (report.requests, report.failed, report.errors) == (3, 1, ("no",))
    assert report.seconds == 3.0
    assert report.output_tokens_per_second == pytest.approx(4 / 3)
    assert report.requests_per_second == pytest.approx(2 / 3)
    assert (report.prompt_tokens, report.cached_tokens) == (20, 4)
    assert (report.ttft.p50, report.ttft.p99) == (0.25, 0.5)
    assert (report.inter_token.p50, report.inter_token.p95) == (0.25, 0.5)
    assert (report.end_to_end.p50, report.end_to_end.p99) == (1.25, 1.5)
    assert json.loads(json.dumps(report.as_dict()))["ttft"]["p95"] == 0.5
    nothing = summarize("w", 1, [])
    assert (nothing.seconds, nothing.requests_per_second, nothing.ttft.p50) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 21, 99, 100, 101])
def test_percentiles_are_nearest_ranks(count: int) -> None:
    """Against the definition: the smallest value that at least so many percent are not above."""
    values = [float((i * 37) % count) for i in range(count)]
    found = Percentiles.of(values)
    for percent, value in ((50, found.p50), (95, found.p95), (99, found.p99)):
        slow = min(v for v in values if 100 * sum(w <= v for w in values) >= percent * count)
        assert value == slow
    assert found.mean == pytest.approx(sum(values) / count)


def test_workloads_are_the_same_every_time() -> None:
    for name, make in WORKLOADS.items():
        first, second = make(requests=6), make(requests=6)
        assert first == second
        assert first.name == name
        assert len(set(first.prompts)) == 6
    shared = WORKLOADS["shared-prefix"](requests=3)
    assert len({prompt[:4000] for prompt in shared.prompts}) == 1
    assert WORKLOADS["sequential"]().concurrency == 1
    assert len({prompt[:100] for prompt in WORKLOADS["concurrent"]().prompts}) == 100


def test_addresses() -> None:
    path = "/v1/chat/completions"
    for url, expected in (
        ("http://h:81", ("h", 81, path, False)),
        ("h:81", ("h", 81, path, False)),
        ("http://h/v1/", ("h", 80, path, False)),
        ("https://h/base/v1", ("h", 443, "/base" + path, True)),
        ("http://[::1]:9", ("::1", 9, path, False)),
    ):
        target = Target.parse(url, "m")
        assert (target.host, target.port, target.path, target.tls) == expected
    for url in ("ftp://h", "http://", "http://h:port", "http://h:99999", ""):
        with pytest.raises(ConfigError, match="url"):
            Target.parse(url, "m")
