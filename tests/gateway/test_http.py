"""Bodies, headers, keys, origins and names: everything around a request that is not its content."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from .world import Plan, World, served, spoken, world

JSON = {"content-type": "application/json"}
GOOD = b'{"model":"parrot","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


def is_openai_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = json.loads(answer.content.decode("utf-8"))
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    found: dict[str, Any] = body["error"]
    return found


BAD_BODIES: list[bytes] = [
    b"",
    b"   ",
    b"{",
    b"[]",
    b"7",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"\xef\xbb\xbf" + GOOD,
    '{"model":"parrot","messages":[{"role":"user","content":"你好"}]}'.encode("gbk"),
    GOOD.replace(b"hi", rb"\ud800"),
    GOOD.replace(b"hi", b"\xc3"),
    GOOD.replace(b"hi", b"a\x00b"),
    GOOD.replace(b'"hi"', b"NaN"),
    GOOD + b"}",
    GOOD[:-1] + b',"temperature":"\xff\xfe"}',
    GOOD[:-1] + b',"unknown":"\xff"}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_a_malformed_body_is_answered_with_400(parrot: World, body: bytes) -> None:
    """Field case BR-071."""
    error = is_openai_error(await parrot.client.post(CHAT, content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"
    assert not parrot.engine.requests
    assert await parrot.alive()


async def test_duplicate_keys_take_the_last(parrot: World) -> None:
    body = GOOD[:-1] + b',"max_tokens":5,"max_tokens":1}'
    for _ in range(3):
        assert (await parrot.client.post(CHAT, content=body, headers=JSON)).status_code == 200
    assert {request.sampling.max_tokens for request in parrot.engine.requests} == {1}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        (None, 400),
    ],
)
async def test_the_content_type_must_be_json(parrot: World, kind: str | None, status: int) -> None:
    answer = await parrot.client.post(
        CHAT, content=GOOD, headers={} if kind is None else {"content-type": kind}
    )
    assert answer.status_code == status
    if status == 400:
        assert is_openai_error(answer, 400)["code"] == "unsupported_content_type"


async def test_a_compressed_body_is_refused_unread(parrot: World) -> None:
    answer = await parrot.client.post(CHAT, content=GOOD, headers={**JSON, "content-encoding": "gzip"})
    assert is_openai_error(answer, 400)["code"] == "unsupported_encoding"


async def test_a_body_over_the_limit_is_413() -> None:
    async with world(Plan(flags={"limits.max_body_bytes": 1000})) as w:
        big = GOOD.replace(b"hi", b"x" * 2000)
        assert (
            is_openai_error(await w.client.post(CHAT, content=big, headers=JSON), 413)["code"]
            == "payload_too_large"
        )

        async def pieces() -> Any:
            for _ in range(50):
                yield b" " * 100

        answer = await w.client.post(CHAT, content=pieces(), headers=JSON)
        assert answer.status_code == 413
        assert await w.alive()


async def test_paths_and_methods_that_do_not_exist(parrot: World) -> None:
    """Field case BR-067."""
    assert is_openai_error(await parrot.client.get("/nope"), 404)["code"] == "not_found"
    assert is_openai_error(await parrot.client.get("/v1/models/"), 404)
    answer = await parrot.client.get(CHAT)
    assert is_openai_error(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


async def test_missing_fields_are_named(parrot: World) -> None:
    for body, param in (({"messages": []}, "model"), ({"model": "parrot"}, "messages")):
        error = is_openai_error(await parrot.client.post(CHAT, json=body), 400)
        assert error["param"] == param
        assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("name", ["no-such", "", "Parrot", "../../etc/passwd", "parrot\u0000", "x" * 10_000])
async def test_an_unknown_model_is_404_and_answered_by_nobody(parrot: World, name: str) -> None:
    """Field case BR-068."""
    for answer in (
        await parrot.chat(model=name),
        await parrot.complete(model=name),
        await parrot.client.post("/tokenize", json={"model": name, "prompt": "x"}),
    ):
        error = is_openai_error(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(answer.content) < 400
    assert not parrot.engine.requests
    assert is_openai_error(await parrot.chat(model=None), 400)["param"] == "model"


async def test_the_list_of_models_holds_exactly_what_is_accepted() -> None:
    async with world(Plan(name="org/parrot")) as w:
        listed = (await w.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert (model["id"], model["object"], type(model["created"])) == ("org/parrot", "model", int)
        assert isinstance(model["owned_by"], str)
        for path in ("org/parrot", "org%2Fparrot"):
            assert (await w.client.get(f"/v1/models/{path}")).json() == model
        assert is_openai_error(await w.client.get("/v1/models/org"), 404)["code"] == "model_not_found"
        answer = await w.chat(model="org/parrot")
        assert answer.json()["model"] == "org/parrot"
        assert answer.headers["x-toque-model-version"] == "v1-abc"


async def test_every_answer_carries_a_request_id(parrot: World) -> None:
    for path in ("/live", "/nope", "/v1/models"):
        assert re.fullmatch(r"req-[0-9a-f]{32}", (await parrot.client.get(path)).headers["x-request-id"])
    given = {"x-request-id": "my-id.1:2_3"}
    assert (await parrot.client.get("/live", headers=given)).headers["x-request-id"] == "my-id.1:2_3"
    for odd in ("a b", "x" * 129, "é".encode(), 'a"b'):
        assert (await parrot.client.get("/live", headers={"x-request-id": odd})).headers[
            "x-request-id"
        ] != odd
    twins = await asyncio.gather(
        *(parrot.client.post(CHAT, content=GOOD, headers={**JSON, **given}) for _ in "ab")
    )
    assert [answer.status_code for answer in twins] == [200, 200]
    assert len({request.request_id for request in parrot.engine.requests}) == 2


ORIGIN = "https://app.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_browsers_from_allowed_origins_only() -> None:
    """Field case BR-070."""
    flags = {"auth.api_keys": ["k1"], "server.cors_origins": [ORIGIN]}
    async with world(Plan(flags=flags)) as w:
        allowed = await w.client.options(CHAT, headers=PREFLIGHT)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
        refused = await w.client.post(CHAT, content=GOOD, headers={**JSON, "origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        other = await w.client.options(CHAT, headers={**PREFLIGHT, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-headers" not in other.headers
        answer = await w.client.post(
            CHAT, content=GOOD, headers={**JSON, "origin": "null", "authorization": "Bearer k1"}
        )
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_every_route_needs_a_key_unless_it_is_on_the_list() -> None:
    async with world(Plan(flags={"auth.api_keys": ["k1", "k2"]})) as w:
        for path in ("/live", "/ready", "/health"):
            assert (await w.client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/nope", "/docs/", "/live/", "/v1/models/parrot"):
            error = is_openai_error(await w.client.get(path), 401)
            assert error["type"] == "authentication_error"
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/live"):
            assert (await w.client.post(path, content=GOOD, headers=JSON)).status_code in (401, 405)
        for value in ("Bearer k1", "bearer k2", "BEARER  k1 "):
            assert (await w.client.get("/v1/models", headers={"authorization": value})).status_code == 200
        for value in ("k1", "Bearer", "Bearer ", "Basic k1", "Bearer k3", "Bearer k1k2", "Bearer \xff"):
            answer = await w.client.get("/v1/models", headers={"authorization": value.encode("latin-1")})
            assert is_openai_error(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        assert not w.engine.requests
        for key in ("k1", "k2", "k1"):
            await w.client.post(CHAT, content=GOOD, headers={**JSON, "authorization": f"Bearer {key}"})
        tenants = [request.tenant for request in w.engine.requests]
        assert tenants[0] == tenants[2] != tenants[1]
        assert not any("k1" in tenant for tenant in tenants)


async def test_tokenize_and_detokenize(parrot: World) -> None:
    answer = await parrot.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert answer.json()["tokens"] == [256, 104, 195, 169]
    assert answer.json()["count"] == 4
    assert answer.json()["max_model_len"] == 512
    assert answer.json()["token_strs"][:2] == ["<s>", "h"]
    plain = await parrot.client.post(
        "/tokenize", json={"model": "parrot", "prompt": "h", "add_special_tokens": False}
    )
    assert plain.json()["tokens"] == [104]
    messages = [{"role": "user", "content": "hi"}]
    chat = (await parrot.client.post("/tokenize", json={"messages": messages})).json()
    await parrot.chat(messages=messages)
    assert tuple(chat["tokens"]) == parrot.engine.requests[0].prompt
    back = await parrot.client.post("/detokenize", json={"tokens": [256, 104, 195, 169]})
    assert back.json() == {"prompt": "<s>hé"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/detokenize", {"tokens": [258]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        assert is_openai_error(await parrot.client.post(path, json=body), 400)["param"] == param


async def exchange(url: str, *parts: bytes, pause: float = 0.0, wait: float = 60.0) -> bytes:
    """Send bytes as they are and read until the server closes, or ``wait`` is over."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        async with asyncio.timeout(wait):
            while data := await reader.read(65536):
                received += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return received


def raw(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"host: localhost", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as w:
        first = raw(b"{", path=b"/v1/completions")
        received = await exchange(w.url, first + raw(GOOD, b"connection: close"))
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"400", b"200"]


async def test_what_is_not_http_is_400_json() -> None:
    async with served() as w:
        received = await exchange(w.url, b"\x16\x03\x01 nonsense\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 400")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert await w.alive()


async def test_slow_headers_and_slow_bodies_time_out() -> None:
    flags = {"server.header_timeout_s": 0.3, "server.body_timeout_s": 0.3}
    async with served(Plan(flags=flags)) as w:
        started = time.perf_counter()
        slow, silent, half = await asyncio.gather(
            exchange(w.url, *[b"P", b"O", b"S", b"T"], pause=0.05),
            exchange(w.url),
            exchange(w.url, raw(GOOD)[:-10]),
        )
        assert time.perf_counter() - started < 30  # the server closed them, not `exchange`
        assert slow.startswith(b"HTTP/1.1 408")
        assert silent == b""
        assert half.startswith(b"HTTP/1.1 400")
        assert b"body_timeout" in half
        assert (await w.chat()).status_code == 200
        await asyncio.sleep(0.5)  # an idle kept-alive connection is not a slow one
        assert (await w.chat()).status_code == 200


async def test_huge_headers_are_431() -> None:
    async with served(Plan(script=spoken("abc", delay_s=0.05))) as w:
        streaming = asyncio.create_task(w.chat(stream=True))
        blob = b"GET /live HTTP/1.1\r\nx: " + b"a" * 10_000_000
        received = await exchange(w.url, blob)
        assert received.startswith(b"HTTP/1.1 431") or received == b""
        small = await exchange(w.url, b"GET /live HTTP/1.1\r\nx: " + b"a" * 100_000, pause=0.1)
        assert small.startswith(b"HTTP/1.1 431")
        assert b"\r\nx-request-id: req-" in small
        assert (await streaming).status_code == 200
