"""A request that is sent again with the same ``Idempotency-Key`` is answered again and billed once (BR-079)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from toque.gateway.answer_store import AnswerStore, KeptAnswer
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.routing.fake import Script

from .world import FIRST_PIECE, Plan, World, events, served, soon, spoken, world

KEY = {"idempotency-key": "order-7"}


@asynccontextmanager
async def keeping(
    folder: Path, plan: Plan | None = None, *, sockets: bool = False, **store: Any
) -> AsyncIterator[World]:
    async with (served if sockets else world)(plan or Plan()) as made:
        made.gateway.answers = AnswerStore(folder / "answers.db", **store)
        yield made


async def ask(w: World, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "parrot", "prompt": "hi", **fields}
    return await w.client.post("/v1/completions", json=body, headers=KEY if headers is None else headers)


async def test_the_same_request_gets_the_same_answer_and_nothing_is_computed(tmp_path: Path) -> None:
    async with keeping(tmp_path) as w:
        first = await ask(w)
        again = await ask(w)
        assert first.status_code == again.status_code == 200
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first.headers
        assert again.headers["x-toque-model-version"] == first.headers["x-toque-model-version"]
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert len(w.engine.requests) == 1
        other = await ask(w, {"idempotency-key": "order-8"})
        assert other.json()["id"] != first.json()["id"]
        assert (await ask(w, {})).headers.get("idempotent-replayed") is None


async def test_a_stream_is_replayed_as_the_same_events(tmp_path: Path) -> None:
    async with keeping(tmp_path, Plan(script=spoken("a few words"))) as w:
        first = await ask(w, stream=True, stream_options={"include_usage": True})
        again = await ask(w, stream=True, stream_options={"include_usage": True})
        assert events(again) == events(first)
        assert events(again)[-1] == "[DONE]"
        assert again.headers["idempotent-replayed"] == "true"
        assert len(w.engine.requests) == 1


async def test_another_body_or_path_under_the_key_is_refused_by_name(tmp_path: Path) -> None:
    async with keeping(tmp_path) as w:
        assert (await ask(w)).status_code == 200
        for answer in (
            await ask(w, prompt="something else"),
            await w.client.post(
                "/v1/chat/completions",
                json={"model": "parrot", "messages": [{"role": "user", "content": "hi"}]},
                headers=KEY,
            ),
        ):
            assert answer.status_code == 422
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
            assert "Idempotency-Key" in error["message"]
        assert len(w.engine.requests) == 1


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "tschüß"])
async def test_a_key_that_is_none_is_refused_by_name(tmp_path: Path, key: str) -> None:
    async with keeping(tmp_path) as w:
        answer = await w.client.post(
            "/v1/completions",
            json={"model": "parrot", "prompt": "hi"},
            headers={"idempotency-key": key.encode()},  # type: ignore[dict-item]  # bytes, for what is not ASCII
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Idempotency-Key"


async def test_keys_of_different_callers_are_different(tmp_path: Path) -> None:
    async with keeping(tmp_path, Plan(flags={"auth.api_keys": ("one", "two")})) as w:
        first = await ask(w, {**KEY, "authorization": "Bearer one"})
        second = await ask(w, {**KEY, "authorization": "Bearer two"}, prompt="another")
        assert first.status_code == second.status_code == 200
        assert len(w.engine.requests) == 2


async def test_while_the_first_is_answered_the_second_is_told_to_come_again(tmp_path: Path) -> None:
    plan = Plan(script=spoken("slow", first_delay_s=0.3))
    async with keeping(tmp_path, plan, sockets=True) as w:
        first = asyncio.create_task(ask(w))
        await soon(lambda: w.engine.running == 1)
        early = await ask(w)
        assert early.status_code == 409
        assert early.json()["error"]["code"] == "idempotency_in_progress"
        assert int(early.headers["retry-after"]) >= 1
        assert (await ask(w, prompt="another")).status_code == 422
        whole = await first
        assert (await ask(w)).content == whole.content
        assert not w.gateway.answering


async def test_what_failed_or_was_left_may_be_tried_again(tmp_path: Path) -> None:
    plan = Plan(script=Script(b"x" * 400, delay_s=0.01))
    async with keeping(tmp_path, plan, sockets=True) as w:
        body = {"model": "parrot", "prompt": "hi", "max_tokens": 300}
        with pytest.raises(httpx.ReadTimeout):
            await w.client.post(
                "/v1/completions", json=body, headers=KEY, timeout=httpx.Timeout(60, read=0.1)
            )
        await soon(lambda: not w.gateway.answering)
        w.engine.script = Script(b"xy", error=RuntimeError("broke"), fail_at=1)  # type: ignore[arg-type]
        assert (await ask(w, max_tokens=300)).status_code == 500
        broken = await ask(w, max_tokens=300, stream=True)
        assert "[DONE]" not in broken.text
        assert (await ask(w, temperature=9.0)).status_code == 400
        w.engine.script = spoken("at last")
        answer = await ask(w, max_tokens=300)
        assert answer.status_code == 200
        assert "idempotent-replayed" not in answer.headers


async def test_answers_survive_a_restart_and_are_billed_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, apply_s=0.02)
    ledger.start()
    async with keeping(tmp_path) as w:
        w.gateway.ledger = ledger
        first = await ask(w)
    async with keeping(tmp_path) as w:
        w.gateway.ledger = ledger
        again = await ask(w)
        assert again.content == first.content
        assert not w.engine.requests
    assert await asyncio.to_thread(ledger.flush)
    database = Database(ledger.url)
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT request_id, idempotency_key FROM usage_event").all()
    database.close()
    ledger.close()
    assert rows == [(first.json()["id"], "order-7")]


async def test_answers_are_forgotten_by_age_and_by_size(tmp_path: Path) -> None:
    now = 1_000_000.0
    store = AnswerStore(tmp_path / "answers.db", age_s=100, max_bytes=2_500, clock=lambda: now)

    async def kept() -> list[str]:
        return [name for name in "abcd" if await store.find("k", name) is not None]

    for name in "abc":
        now += 10
        await store.keep("k", name, KeptAnswer(b"d", "text/plain", "m", "", name.encode() * 1_000))
    assert await kept() == ["b", "c"]
    now += 95
    assert await kept() == ["c"]
    now += 200
    assert await kept() == []
    store.close()
    assert b"c" * 1_000 not in (tmp_path / "answers.db").read_bytes()
    assert (tmp_path / "answers.db").stat().st_mode & 0o777 == 0o600


async def test_old_texts_are_forgotten_while_nobody_asks_and_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    idle = AnswerStore(path)
    idle.start()
    idle.close()
    assert not path.exists()  # nothing is made where nothing is kept
    first = AnswerStore(path)
    await first.keep("k", "a", KeptAnswer(b"d", "text/plain", "m", "", b"old text" * 100))
    first.close()
    second = AnswerStore(path, age_s=1e-3)
    second.start(every_s=0.01)
    await soon(lambda: b"old text" not in path.read_bytes())
    second.close()


async def test_an_answer_too_long_to_keep_is_sent_all_the_same(tmp_path: Path) -> None:
    plan = Plan(pieces=[b"y" * 400_000], flags={"idempotency.max_answer_mb": 1})
    async with keeping(tmp_path, plan) as w:
        w.engine.script = Script([FIRST_PIECE] * 3)
        for stream in (False, True):
            key = {"idempotency-key": f"long-{stream}"}
            answers = [await ask(w, key, stream=stream, max_tokens=3) for _ in range(2)]
            assert all(answer.status_code == 200 and len(answer.content) > 2**20 for answer in answers)
            assert all("idempotent-replayed" not in answer.headers for answer in answers)


async def test_a_store_that_cannot_be_used_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "answers.db").write_bytes(b"not a database, and longer than a hundred bytes" * 10)
    async with keeping(tmp_path) as w:
        assert (await ask(w)).status_code == 200
        assert (await ask(w)).status_code == 200
        assert len(w.engine.requests) == 2


async def test_nothing_is_opened_before_a_key_comes_and_nothing_kept_without_the_setting(
    tmp_path: Path,
) -> None:
    async with keeping(tmp_path) as w:
        assert (await ask(w, {})).status_code == 200
        assert not (tmp_path / "answers.db").exists()
        w.gateway.answers = None
        assert (await ask(w)).status_code == 200
        assert (await ask(w)).json()["id"]
        assert len(w.engine.requests) == 3


async def test_the_official_client_gets_a_kept_answer_and_its_own_error_class(tmp_path: Path) -> None:
    async with (
        keeping(tmp_path, Plan(script=spoken("hello")), sockets=True) as w,
        openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none") as client,
    ):

        async def chat(text: str) -> Any:
            return await client.chat.completions.with_raw_response.create(
                model="parrot",
                messages=[{"role": "user", "content": text}],
                extra_headers={"Idempotency-Key": "from-the-client"},
            )

        async def stream() -> str:
            chunks = await client.chat.completions.create(
                model="parrot",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_headers={"Idempotency-Key": "streamed"},
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        first, again = await chat("hi"), await chat("hi")
        assert again.headers["idempotent-replayed"] == "true"
        assert again.parse().id == first.parse().id
        assert again.parse().usage == first.parse().usage
        with pytest.raises(openai.UnprocessableEntityError, match="Idempotency-Key"):
            await chat("something else")
        assert [await stream(), await stream()] == ["hello", "hello"]
        assert len(w.engine.requests) == 2


async def test_two_at_once_from_the_official_client_are_computed_once(tmp_path: Path) -> None:
    async with (
        keeping(tmp_path, Plan(script=spoken("slow", first_delay_s=0.2)), sockets=True) as w,
        openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=3) as client,
    ):
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="parrot",
                    messages=[{"role": "user", "content": "twice"}],
                    extra_headers={"Idempotency-Key": "twice"},
                )
                for _ in range(2)
            )
        )
        assert answers[0] == answers[1]
        assert len(w.engine.requests) == 1
