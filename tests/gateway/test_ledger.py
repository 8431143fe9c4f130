"""Ledger = usage in answers = counters in /metrics, to the token, whatever clients and engines do (BR-079)."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from toque.errors import EngineError, ReplicaDiedError, UnavailableError
from toque.monitor.cost import Budget, Price, PriceList
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.metering import pricing
from toque.monitor.spend import Spend
from toque.routing.fake import Script
from toque.types import EngineRequest

from .world import EOS, Plan, World, events, served, soon, spoken, world

PRICES = PriceList({"parrot": Price(Decimal("0.5"), Decimal("2"), Decimal("0.125"))})


def rows(ledger: Ledger) -> list[dict[str, Any]]:
    assert ledger.flush()
    database = Database(ledger.url)
    with database.read() as connection:
        found = connection.exec_driver_sql("SELECT * FROM usage_event ORDER BY opened_at").mappings().all()
    database.close()
    return [dict(row) for row in found]


@asynccontextmanager
async def kept(
    folder: Path, plan: Plan, *, sockets: bool = False, spend: Spend | None = None
) -> AsyncIterator[tuple[World, Ledger]]:
    ledger = Ledger(folder, price=pricing(PRICES, Decimal(1)), spend=spend, apply_s=0.02)
    ledger.start()
    try:
        async with (served if sockets else world)(plan) as w:
            w.gateway.ledger = ledger
            yield w, ledger
    finally:
        ledger.close()


async def counters(w: World) -> dict[str, float]:
    text = (await w.client.get("/metrics")).text
    return {n: float(v) for n, v in re.findall(r"^([^#\s]\S*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


async def test_an_answer_is_one_row_that_says_what_the_answer_said(tmp_path: Path) -> None:
    async with kept(
        tmp_path, Plan(script=spoken("answer", cached_tokens=2), flags={"auth.api_keys": "k"})
    ) as (w, led):
        w.client.headers["authorization"] = "Bearer k"
        answer = await w.chat(n=2)
        (row,) = await asyncio.to_thread(rows, led)
        usage = answer.json()["usage"]
        assert row["prompt_tokens"] == usage["prompt_tokens"] > 0
        assert row["completion_tokens"] == usage["completion_tokens"] == 2 * len(b"answer") + 2
        assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert (row["outcome"], row["status"], row["finish_reason"], row["choices"]) == ("ok", 200, "stop", 2)
        assert row["request_id"] == answer.json()["id"]
        assert row["client_id"] == answer.headers["x-request-id"]
        assert (row["endpoint"], row["model"], row["version"]) == ("/v1/chat/completions", "parrot", "v1-abc")
        assert row["tenant"] == row["key_id"] != ""
        assert (
            row["list_nano"] == (row["prompt_tokens"] - 2) * 500 + 2 * 125 + row["completion_tokens"] * 2000
        )
        assert 0 < row["ttft_us"] <= row["total_us"]
        assert row["stream"] == 0


async def test_usage_is_kept_whether_or_not_the_client_asked_for_it(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan()) as (w, led):
        shown = events(await w.chat(stream=True, stream_options={"include_usage": True}))[-2]["usage"]
        assert "usage" not in events(await w.chat(stream=True))[0]
        first, second = await asyncio.to_thread(rows, led)
        for name in ("prompt_tokens", "completion_tokens"):
            assert first[name] == second[name] == shown[name]
        assert first["stream"] == second["stream"] == 1


async def test_what_is_refused_before_admission_has_no_row_and_what_is_refused_after_has_an_empty_one(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path, Plan(context=64)) as (w, led):
        assert (await w.chat(temperature=7)).status_code == 400
        assert (await w.chat(model="other")).status_code == 404
        assert (await w.client.post("/v1/completions", content=b"{")).status_code in (400, 415)
        assert await asyncio.to_thread(rows, led) == []
        assert (await w.complete(prompt="x" * 100)).status_code == 400
        (row,) = await asyncio.to_thread(rows, led)
        assert (row["outcome"], row["status"], row["error_code"]) == (
            "refused",
            400,
            "context_length_exceeded",
        )
        assert row["prompt_tokens"] == row["completion_tokens"] == row["list_nano"] == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineError("broke"), 500), (ReplicaDiedError("gone"), 500), (UnavailableError("no"), 503)],
)
async def test_failures_keep_what_was_computed_and_sell_nothing(
    tmp_path: Path, error: Exception, status: int
) -> None:
    script = Script(tokens=b"x" * 9, error=error, fail_at=0 if status == 503 else 4)  # type: ignore[arg-type]
    async with kept(tmp_path, Plan(script=script)) as (w, led):
        assert (await w.complete()).status_code == status
        (row,) = await asyncio.to_thread(rows, led)
        assert (row["outcome"], row["status"], row["finish_reason"]) == ("failed", status, "error")
        assert (row["prompt_tokens"], row["completion_tokens"]) == ((0, 0) if status == 503 else (3, 4))
        assert row["list_nano"] == 0
        assert row["error_code"]


async def test_a_client_that_leaves_pays_for_what_was_generated_until_then(tmp_path: Path) -> None:
    plan = Plan(script=Script(b"x" * 500, delay_s=0.005, hold=True))
    async with kept(tmp_path, plan, sockets=True) as (w, led):
        body = {"model": "parrot", "prompt": "hi", "max_tokens": 400, "stream": True}
        async with w.client.stream("POST", "/v1/completions", json=body) as answer:
            received = 0
            async for line in answer.aiter_lines():
                received += line.startswith("data: {")
                if received == 7:
                    break
        with pytest.raises(httpx.ReadTimeout):
            await w.client.post(
                "/v1/completions", json={**body, "stream": False}, timeout=httpx.Timeout(5, read=0.15)
            )
        await soon(lambda: w.engine.running == 0)
        streamed, whole = await asyncio.to_thread(rows, led)
        for row in (streamed, whole):
            assert (row["outcome"], row["status"], row["finish_reason"]) == ("cancelled", 499, "abort")
            assert row["prompt_tokens"] == 3
            assert row["list_nano"] == 3 * 500 + row["completion_tokens"] * 2000
        assert 7 <= streamed["completion_tokens"] < 400
        assert 1 <= whole["completion_tokens"] < 400
        assert streamed["completion_tokens"] + whole["completion_tokens"] <= w.engine.generated_tokens
        generated = (await counters(w))['toque_generation_tokens_total{model="parrot"}']
        assert generated == streamed["completion_tokens"] + whole["completion_tokens"]


async def test_no_output_at_all_stays_no_output(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan(script=Script([EOS]))) as (w, led):
        assert (await w.complete(max_tokens=0, echo=True)).status_code == 200
        (row,) = await asyncio.to_thread(rows, led)
        assert (row["completion_tokens"], row["outcome"], row["finish_reason"]) == (0, "ok", "length")


async def test_a_request_id_that_comes_twice_is_two_requests(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan()) as (w, led):
        for _ in range(2):
            await w.client.post(
                "/v1/completions", json={"model": "parrot", "prompt": "hi"}, headers={"x-request-id": "mine"}
            )
        found = await asyncio.to_thread(rows, led)
        assert [row["client_id"] for row in found] == ["mine", "mine"]


async def test_a_ledger_without_its_database_slows_nobody(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database, and longer than a hundred bytes" * 10)
    ledger = Ledger(tmp_path, apply_s=0.02)
    ledger.start()
    async with world() as w:
        w.gateway.ledger = ledger
        for _ in range(20):
            assert (await w.chat()).status_code == 200
        await soon(lambda: ledger.status().state == "buffering")
    ledger.close(0.2)


def _script(request: EngineRequest) -> Script:
    """What a request's seed asks for; choices of one request have seeds of their own, so only the first byte counts."""
    kind = bytes(request.prompt[-1:])
    rng = random.Random(len(request.prompt))
    text = [*(b"abcdefgh" * 5)[: rng.randrange(0, 30)]]
    cached = rng.randrange(0, len(request.prompt))
    if kind == b"f":
        return Script(
            text + [65] * 5, error=ReplicaDiedError("died"), fail_at=rng.randrange(0, len(text) + 2)
        )
    if kind == b"h":
        return Script(text, hold=True, cached_tokens=cached)
    if kind == b"s":
        return Script([65] * 400, first_delay_s=rng.choice([0, 0.03]), delay_s=0.01, cached_tokens=cached)
    return Script([*text, EOS], per_step=rng.choice([1, 1, 2, 4]), cached_tokens=cached)


@pytest.mark.parametrize("seed", range(3))
async def test_a_random_mix_reconciles_to_the_token(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shown: list[dict[str, Any]] = []
    statuses: Counter[int] = Counter()

    async def one(w: World, number: int) -> None:
        kind = rng.choice("ooooofhs!")
        prompt = "p" * rng.randrange(1, 40) + kind
        body: dict[str, Any] = {
            "model": "parrot",
            "n": rng.choice([1, 1, 1, 3]),
            "max_tokens": rng.choice([5, 60]),
        }
        if rng.random() < 0.2:
            body["stop"] = ["def"]
        if kind == "!":
            body["temperature"] = 9
        chat = rng.random() < 0.5
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": kind}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            body["prompt"] = prompt if rng.random() < 0.7 else [prompt, "q" + prompt]
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.6}}
        timeout = httpx.Timeout(5, read=0.1 if kind in "hs" else 5)
        try:
            answer = await w.client.post(path, json=body, timeout=timeout)
        except httpx.ReadTimeout:
            return
        statuses[answer.status_code] += 1
        if answer.status_code == 200 and "stream" not in body:
            shown.append({"id": answer.json()["id"], **answer.json()["usage"]})
        elif answer.status_code == 200:
            for event in events(answer):
                if event != "[DONE]" and event.get("usage"):
                    shown.append({"id": event["id"], **event["usage"]})

    async with kept(tmp_path, Plan(script=_script), sockets=True) as (w, led):
        for _ in range(4):
            await asyncio.gather(*(one(w, number) for number in range(25)))
        await soon(lambda: w.engine.running == 0 and led.status().open == 0)
        found = await asyncio.to_thread(rows, led)
        after = await counters(w)
    by_id = {row["request_id"]: row for row in found}
    assert len(by_id) == len(found) == 100 - statuses[400]
    assert len(shown) > 10
    for usage in shown:
        row = by_id[usage["id"]]
        assert row["outcome"] == "ok"
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        assert row["completion_tokens"] == usage["completion_tokens"]
        assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert {"ok", "cancelled", "failed"} <= {row["outcome"] for row in found}
    label = '_total{model="parrot"}'
    assert after["toque_prompt_tokens" + label] == sum(row["prompt_tokens"] for row in found)
    assert after["toque_prompt_tokens_cached" + label] == sum(row["cached_tokens"] for row in found)
    assert after["toque_generation_tokens" + label] == sum(row["completion_tokens"] for row in found)
    assert sum(row["completion_tokens"] for row in found) <= w.engine.generated_tokens
    first_tokens = after['toque_time_to_first_token_seconds_count{model="parrot"}']
    assert first_tokens == sum(row["ttft_us"] > 0 for row in found)
    finished = after['toque_e2e_request_latency_seconds_count{model="parrot"}']
    assert finished == sum(row["outcome"] == "ok" for row in found)


async def test_the_admin_api_tells_usage_as_json_and_csv(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan()) as (w, led):
        usages = [(await w.chat()).json()["usage"], (await w.complete()).json()["usage"]]
        assert await asyncio.to_thread(led.flush)
        answer = await w.client.get("/admin/v1/usage", params={"group_by": "endpoint", "since": "1h"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert [row["endpoint"] for row in found["data"]] == ["/v1/chat/completions", "/v1/completions"]
        assert [row["completion_tokens"] for row in found["data"]] == [u["completion_tokens"] for u in usages]
        assert found["total"]["requests"] == 2
        sheet = await w.client.get("/admin/v1/usage?format=csv&group_by=model")
        assert sheet.headers["content-type"].startswith("text/csv")
        assert sheet.text.splitlines()[-1].startswith("TOTAL,2,2,")
        for query, param in (
            ("group_by=colour", "group_by"),
            ("since=soon", "since"),
            ("colour=red", "colour"),
            ("format=xml", "format"),
            ("month=2026-09&since=1d", "month"),
        ):
            refused = await w.client.get(f"/admin/v1/usage?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_request_can_be_looked_up_by_either_id(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan()) as (w, led):
        answer = await w.chat()
        assert await asyncio.to_thread(led.flush)
        for name in (answer.json()["id"], answer.headers["x-request-id"]):
            (row,) = (await w.client.get(f"/admin/v1/requests/{name}")).json()["data"]
            assert row["request_id"] == answer.json()["id"]
        assert (await w.client.get("/admin/v1/requests/nobody")).status_code == 404


async def test_a_key_sees_its_own_tenant_only(tmp_path: Path) -> None:
    async with kept(tmp_path, Plan(flags={"auth.api_keys": "one,two"})) as (w, led):
        w.client.headers["authorization"] = "Bearer one"
        answer = await w.chat()
        assert await asyncio.to_thread(led.flush)
        mine = (await w.client.get("/admin/v1/usage?group_by=tenant")).json()
        assert mine["total"]["requests"] == 1
        w.client.headers["authorization"] = "Bearer two"
        assert (await w.client.get("/admin/v1/usage")).json()["total"]["requests"] == 0
        other = await w.client.get(f"/admin/v1/usage?tenant={mine['data'][0]['tenant']}")
        assert other.status_code == 404
        assert (await w.client.get(f"/admin/v1/requests/{answer.json()['id']}")).status_code == 404
        del w.client.headers["authorization"]
        assert (await w.client.get("/admin/v1/usage")).status_code == 401


async def test_stats_show_percentiles_engines_and_cost(tmp_path: Path) -> None:
    async with world() as w:
        assert (await w.client.get("/admin/v1/usage")).status_code == 404  # this one keeps no ledger
        assert (await w.client.get("/admin/v1/stats")).json()["ledger"] is None
    async with kept(tmp_path, Plan()) as (w, _):
        for _ in range(3):
            await w.chat()
        found = (await w.client.get("/admin/v1/stats")).json()
        model = found["models"]["parrot"]
        assert model["latency"]["ttft"]["1m"]["count"] == model["latency"]["e2e"]["60m"]["count"] == 3
        assert 0 < model["latency"]["ttft"]["1m"]["p50"] <= model["latency"]["ttft"]["1m"]["p99"] < 5
        assert model["since_start"]["requests"] == 3
        assert model["since_start"]["list_per_million_tokens"] > 0
        assert found["ledger"]["state"] == "ok"
        assert model["engine"]["running"] == 0


async def test_a_budget_warns_in_a_header_and_then_refuses(tmp_path: Path) -> None:
    spend = Spend(tenants={"": Budget(90_000, soft=0.5)})
    async with kept(tmp_path, Plan(script=spoken("answer")), spend=spend) as (w, led):
        plain = await w.complete(max_tokens=30)  # 3 tokens in, 7 out: 15,500 nano
        assert "x-toque-budget-warning" not in plain.headers
        answers = [await w.complete() for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 200, 429]
        assert answers[2].headers["x-toque-budget-warning"] == "this tenant has spent 51% of its budget"
        error = answers[-1].json()["error"]
        assert (error["code"], error["type"]) == ("budget_exceeded", "insufficient_quota")
        assert int(answers[-1].headers["retry-after"]) > 0
        assert len(await asyncio.to_thread(rows, led)) == 6
