"""What is meant to hurt is answered with 4xx within a second, and somebody else's stream keeps its pace."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import statistics
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from .test_embeddings import give_vectors
from .test_http import GOOD, JSON, exchange, raw
from .world import Plan, World, served, spoken

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STEP_S = 0.02
# CPU time, not the clock's: the machine may be crowded.
WITHIN_S = 1.0  # all that a refusal takes, of this process
PACE_S = 1.0  # between two tokens of the stream, of the thread that client and server share
TYPICAL_S = 0.1
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "prompt": "hi", **fields}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
# path, the field that the answer names, the body
TOO_MANY: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "messages", chat(messages=USER * 4097)),
    (CHAT, "stop", chat(stop=["a"] * 17)),
    (CHAT, "stop_token_ids", chat(stop_token_ids=[1] * 129)),
    (CHAT, "logit_bias", chat(logit_bias={str(i): 0 for i in range(1025)})),
    (CHAT, "bad_words", chat(bad_words=["a"] * 129)),
    (CHAT, "tools", chat(tools=[TOOL] * 129)),
    (CHAT, "chat_template_kwargs", chat(chat_template_kwargs={str(i): 1 for i in range(65)})),
    (
        CHAT,
        "messages[0].tool_calls",
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [CALL] * 129}]),
    ),
    (CHAT, "n", chat(n=129)),
    (TEXT, "prompt", text(prompt=["a"] * 129)),
    (TEXT, "prompt", text(prompt=[[1]] * 129)),
    (TEXT, "n", text(prompt=["a"] * 65, n=2)),
    (TEXT, "stop", text(stop=["a"] * 1_000_000)),
    (TEXT, "stop_token_ids", text(stop_token_ids=[1] * 1_000_000)),
    (TEXT, "bad_words", text(bad_words=["a"] * 1_000_000)),
    (CHAT, "messages", chat(messages=USER * 200_000)),
    (TEXT, "logit_bias", text(logit_bias={str(i): 1.5 for i in range(500_000)})),
    ("/v1/embeddings", "input", {"model": "parrot", "input": ["a"] * 2049}),
    ("/v1/embeddings", "input", {"model": "parrot", "input": [[1]] * 1_000_000}),
    ("/v1/rerank", "documents", {"model": "parrot", "query": "a", "documents": ["a"] * 1025}),
]


@asynccontextmanager
async def beside_a_stream(w: World) -> AsyncIterator[None]:
    """Inside, a stream runs; in the end, no gap between its tokens took more than PACE_S."""
    times: list[float] = []
    started = asyncio.Event()

    async def watch() -> None:
        body = text(stream=True, max_tokens=10_000)
        async with w.client.stream("POST", TEXT, json=body) as answer:
            async for _ in answer.aiter_raw():
                times.append(time.thread_time())
                started.set()

    task = asyncio.create_task(watch())
    await started.wait()
    try:
        yield
        await asyncio.sleep(5 * STEP_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) >= 3
    assert max(gaps) < PACE_S
    assert statistics.median(gaps) < TYPICAL_S


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with served(Plan(script=spoken("x" * 5000, delay_s=STEP_S))) as made:
        yield made


@pytest.fixture
async def hasty() -> AsyncIterator[World]:
    """For requests that never come to their end; a large one may take longer on a crowded machine."""
    flags = {"server.body_timeout_s": 0.3, "server.header_timeout_s": 0.3}
    async with served(Plan(script=spoken("x" * 5000, delay_s=STEP_S), flags=flags)) as made:
        yield made


def refused(answer: httpx.Response, started: float, param: str | None = None) -> None:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:200])
    assert time.process_time() - started < WITHIN_S
    assert len(answer.content) < 1500
    error = answer.json()["error"]
    if param is not None:
        assert error["param"] == param, error


async def test_lists_longer_than_their_limit(w: World) -> None:
    bodies = [(path, param, json.dumps(body).encode()) for path, param, body in TOO_MANY]
    async with beside_a_stream(w):
        for path, param, body in bodies:
            if path in ("/v1/embeddings", "/v1/rerank"):
                continue
            started = time.process_time()
            answer = await w.client.post(path, content=body, headers=JSON)
            refused(answer, started, None if answer.status_code == 413 else param)
    give_vectors(w)
    for path, param, body in bodies:
        if path in ("/v1/embeddings", "/v1/rerank"):
            started = time.process_time()
            answer = await w.client.post(path, content=body, headers=JSON)
            refused(answer, started, None if answer.status_code == 413 else param)


async def test_a_body_of_very_many_values_is_refused_unparsed(w: World) -> None:
    many = await w.client.post(TEXT, json=text(prompt=[1] * 300_002))
    assert many.status_code == 413
    assert many.json()["error"]["code"] == "too_many_items"
    keys = await w.client.post(TEXT, json=text(logit_bias={str(i): 1 for i in range(80_000)}))
    assert keys.status_code == 413
    few = await w.client.post(TEXT, json=text(prompt=[1] * 200_000))
    assert few.status_code == 400
    assert "context" in few.json()["error"]["message"]
    words = await w.client.post(TEXT, json=text(prompt="x" * 400_000))
    assert words.status_code == 400


async def test_bodies_that_grow_when_they_are_unpacked(w: World) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    async with beside_a_stream(w):
        for encoding, body in (
            ("gzip", bomb),
            ("deflate", zlib.compress(GOOD)),
            ("br", b"\x0b\x02\x80"),
            ("zstd", b"\x28\xb5\x2f\xfd"),
            ("identity, gzip", bomb),
            ("gzip, gzip", bomb),
            ("x" * 5000, GOOD),
        ):
            started = time.process_time()
            answer = await w.client.post(CHAT, content=body, headers={**JSON, "content-encoding": encoding})
            refused(answer, started)
            assert answer.json()["error"]["code"] == "unsupported_encoding"


HALF: list[bytes] = [
    raw(GOOD)[:-10],
    raw(GOOD).replace(b"content-length: ", b"content-length: 9"),
    raw(b"")[:-4],
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'transfer-encoding: chunked\r\n\r\n5\r\n{"mod',
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nfffffffffffffff\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    b"GET /live HTTP/1.1\r\nhost: local",
    b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"G" * 200_000,
]


async def test_half_sent_and_contradictory_requests(hasty: World) -> None:
    async with beside_a_stream(hasty):
        for data in HALF:
            started = time.process_time()
            async with asyncio.timeout(50):  # `exchange` itself ends after 60 s
                received = await exchange(hasty.url, data)
            assert time.process_time() - started < WITHIN_S, data[:120]
            assert received == b"" or b"HTTP/1.1 4" in received[:12], (data[:120], received[:80])


async def test_headers_of_ten_megabytes(w: World) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 90) for i in range(100_000))
    async with beside_a_stream(w):
        for block in (b"x: " + b"a" * 10_000_000, many, b"authorization: Bearer " + b"k" * 10_000_000):
            started = time.process_time()
            received = await exchange(w.url, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + block)
            assert time.process_time() - started < WITHIN_S
            assert received == b"" or received.startswith(b"HTTP/1.1 431")


async def test_a_large_body_of_anything(w: World) -> None:
    """At the limit of what is read at all: 8 MiB."""
    size = 8 * 2**20 - 2000
    head = b'{"model":"parrot","messages":[{"role":"user","content":"hi"}],'
    bodies = (
        b"[" * size,
        b'{"a":' * (size // 5),
        b'"' + b"\\u0000" * (size // 6) + b'"',
        b"1" * size,
        head + b'"foo":[' + b"1," * (size // 2) + b'1],"temperature":9}',
        head + b'"stop":[' + b'"a",' * (size // 5) + b'"b"]}',
        head + b'"temperature":' + b"9" * (size - 200) + b"}",
        head + b'"metadata":{' + b",".join(b'"%d":1' % i for i in range(500_000)) + b'},"n":0}',
    )
    huge = b" " * 30_000_000
    async with beside_a_stream(w):
        for body in bodies:
            started = time.process_time()
            refused(await w.client.post(CHAT, content=body, headers=JSON), started)
        started = time.process_time()
        answer = await w.client.post(CHAT, content=huge, headers=JSON)
        assert answer.status_code == 413
        assert time.process_time() - started < WITHIN_S


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "%2e%2e/x",
        "/etc/passwd",
        "C:\\x",
        "file:/etc/passwd",
        "a\u0000b",
        "x" * 10_000,
        ".",
        "",
    ],
)
async def test_a_models_name_is_a_name_and_no_path(parrot: World, name: str) -> None:
    """Field case BR-064: nothing is opened for a name that is not served, and nothing said but that."""
    for answer in (
        await parrot.complete(model=name),
        await parrot.client.post("/v1/embeddings", json={"model": name, "input": "x"}),
        await parrot.client.post("/tokenize", json={"model": name, "prompt": "x"}),
    ):
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["code"] == "model_not_found"
        assert len(answer.text) < 400
    if name not in ("", "."):  # those are the list's own path
        answer = await parrot.client.get("/v1/models/" + quote(name, safe=""))
        assert answer.status_code == 404
    assert not parrot.engine.requests
