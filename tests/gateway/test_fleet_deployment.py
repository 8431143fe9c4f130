"""Deployments that come and go with the fleet's tables: which version answers, what waits, and what is said of it.

The replicas are scripted; each version of the model says its own name.
"""

from __future__ import annotations

import asyncio

import pytest

from toque.errors import EngineError, UnavailableError
from toque.routing.base import ReplicaState
from toque.routing.fake import Script

from .scripted_fleet import fleet, table
from .world import EOS, soon


async def test_a_model_appears_answers_and_goes_while_the_gateway_runs() -> None:
    """Field case BR-074: of nothing, nothing is ready."""
    async with fleet() as f:
        assert await f.status("/ready") == 503
        assert (await f.ask()).status_code == 404
        f.tables(table("a:v1"))
        answer = await f.ask()
        assert answer.json()["choices"][0]["text"] == "v1"
        assert answer.headers["x-toque-model-version"] == "digest-v1"
        assert await f.status("/ready") == 200
        models = (await f.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["version"]) for model in models] == [("m", "digest-v1")]
        f.tables(table("a:v1"), table("b:v1", name="n"))
        answer = await f.client.post("/v1/completions", json={"model": "n", "prompt": "hi"})
        assert answer.status_code == 200
        f.tables(table("b:v1", name="n"))
        assert (await f.ask()).status_code == 404
        assert await f.status("/v1/models/m") == 404


async def test_a_stream_outlives_its_deployment() -> None:
    async with fleet() as f:
        f.scripts["a"] = Script([*b"abcdefgh", EOS], delay_s=0.02)
        f.tables(table("a:v1"))
        asking = asyncio.create_task(f.said())
        await soon(lambda: bool(f.replicas) and f.replicas["a"].running == 1)
        f.tables()
        assert await asking == "abcdefgh"


async def test_a_gateway_is_ready_before_a_model_that_is_added_later() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        await f.said()
        f.tables(table("a:v1"), table("b:v1", name="n"))
        f.replicas["b"].become(ReplicaState.STARTING, "loading")
        assert await f.status("/ready") == 200
        f.replicas["b"].become(ReplicaState.READY)
        await soon(lambda: f.gateway.deployments["n"].ready)
        f.replicas["b"].become(ReplicaState.DEGRADED)
        assert await f.status("/ready") == 503  # it is one of ours now
        f.tables(table("a:v1"), table(name="n", shares={}))
        assert await f.status("/ready") == 200  # switched off


async def test_requests_follow_the_shares_and_each_says_its_version() -> None:
    async with fleet() as f:
        f.tables(table("a:v1", "b:v2", shares={"v1": 0.5, "v2": 0.5}))
        await soon(lambda: len(f.loads) == 2)
        answers = [await f.ask() for _ in range(40)]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert all(
            a.headers["x-toque-model-version"] == f"digest-{t}" for a, t in zip(answers, texts, strict=True)
        )
        assert 8 < texts.count("v2") < 32
        f.tables(table("a:v1", "b:v2", shares={"v2": 1.0}))
        assert {await f.said() for _ in range(5)} == {"v2"}


async def test_a_version_takes_requests_once_its_face_is_loaded_and_the_old_one_until_then() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        assert await f.said() == "v1"
        f.gate.clear()
        f.tables(table("a:v1", "b:v2", shares={"v2": 1.0}))
        assert await f.said() == "v1"
        f.gate.set()
        await soon(lambda: "v2" in f.loads)
        await soon(lambda: f.m.choose("x") is not None and f.m.choose("x").key == "v2")  # type: ignore[union-attr]
        assert await f.said() == "v2"


async def test_a_version_that_cannot_be_read_is_said_and_takes_nothing() -> None:
    async with fleet(load_wait_s=5) as f:
        f.tables(table("a:damaged", shares={"damaged": 1.0}))
        answer = await f.ask()
        assert answer.status_code == 503
        assert "tensor 7 is cut off" in answer.json()["error"]["message"]
        with pytest.raises(UnavailableError, match="tensor 7 is cut off"):
            await f.port.until_settled(1)
        f.tables(table("b:v1"))
        assert await f.said() == "v1"


async def test_twenty_at_a_sleeping_model_wake_it_once_and_are_answered_in_order() -> None:
    async with fleet() as f:
        f.tables(table(asleep=True))
        await soon(lambda: f.loads == ["v1"])
        await asyncio.sleep(0)
        await soon(lambda: f.m.current is not None)
        assert await f.status("/ready") == 200
        assert [model["id"] for model in (await f.client.get("/v1/models")).json()["data"]] == ["m"]
        health = (await f.client.get("/health")).json()
        assert health["models"][0]["state"] == "asleep"
        assert not [signals for signals in f.link.reports if signals.waiting]
        woken: list[int] = []
        f.link.on_report = lambda signals: woken.append(signals.waiting) if signals.waiting else None
        asking = [asyncio.create_task(f.said(prompt="x" * (i + 1))) for i in range(20)]
        await soon(lambda: bool(woken))
        assert woken == [20]  # all that came together are told of at once
        f.tables(table("a:v1"))
        assert await asyncio.gather(*asking) == ["v1"] * 20
        order = [len(request.prompt) for request in f.replicas["a"].requests]
        assert order == sorted(order)


async def test_a_request_that_is_wrong_wakes_nobody() -> None:
    async with fleet() as f:
        f.tables(table(asleep=True))
        await soon(lambda: f.m.current is not None if "m" in f.gateway.deployments else False)
        assert (await f.ask(logit_bias={"100000": 1})).status_code == 400
        assert not [signals for signals in f.link.reports if signals.waiting]


async def test_arrivals_are_held_during_a_swap_and_go_to_the_new_version_in_order() -> None:
    """Field case BR-052: what began on the old version ends on it, what was held begins on the new one."""
    async with fleet() as f:
        f.scripts["a"] = Script([*b"old text", EOS], delay_s=0.02)
        f.tables(table("a:v1"))
        running = asyncio.create_task(f.said())
        await soon(lambda: bool(f.replicas) and f.replicas["a"].running == 1)
        f.tables(table("a:v1", held=True))
        held = []
        for i in range(5):
            held.append(asyncio.create_task(f.said(prompt="x" * (i + 1))))
            await soon(lambda: f.m.signals().waiting == len(held))
            if i == 0:
                await asyncio.sleep(0.3)  # it has waited long when the others come
        assert await running == "old text"
        assert f.m.signals().waiting == 5
        await asyncio.sleep(0.3)  # the first has looked again unasked meanwhile, the others not
        assert await f.status("/ready") == 200
        f.tables(table("a:v1:draining", held=True, shares={"v2": 1.0}))
        f.tables(table("b:v2", held=True, shares={"v2": 1.0}))
        await asyncio.sleep(0.05)
        assert not f.replicas["b"].requests
        f.tables(table("b:v2", shares={"v2": 1.0}))
        assert await asyncio.gather(*held) == ["v2"] * 5
        assert len(f.replicas["a"].requests) == 1
        order = [len(request.prompt) for request in f.replicas["b"].requests]
        assert order == sorted(order)


async def test_a_prepared_request_whose_version_goes_is_prepared_anew() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        await f.said()
        f.replicas["a"].become(ReplicaState.STARTING, "restarting")
        asking = asyncio.create_task(f.said())
        await soon(lambda: f.m.signals().waiting == 1)
        f.tables(table("b:v2", shares={"v2": 1.0}))
        assert await asking == "v2"


async def test_an_error_of_a_new_version_counts_against_it_and_the_old_one_answers() -> None:
    async with fleet() as f:
        f.scripts["b"] = Script(error=EngineError("the device is broken"))
        f.tables(table("a:v1", "b:v2", shares={"v1": 0.5, "v2": 0.5}))
        await soon(lambda: len(f.loads) == 2)
        await soon(lambda: f.m.choose("1", {"v1"}) is not None)
        assert {await f.said() for _ in range(30)} == {"v1"}
        outcomes = f.m.signals().outcomes
        assert outcomes["v1"].answered == outcomes["v1"].requests == 30
        assert outcomes["v2"].errors == outcomes["v2"].requests > 3
        assert sum(outcomes["v1"].ttft_counts) == 30


async def test_what_a_client_does_wrong_or_leaves_is_no_error_of_the_version() -> None:
    async with fleet() as f:
        f.scripts["a"] = Script([*b"abc", EOS], delay_s=0.02)
        f.tables(table("a:v1"))
        await f.said()
        assert (await f.ask(prompt="x" * 5000)).status_code == 400
        assert (await f.ask(timeout=0.01)).status_code == 504
        outcomes = f.m.signals().outcomes["v1"]
        assert (outcomes.requests, outcomes.errors, outcomes.answered) == (2, 0, 1)
        assert outcomes.ttft_seconds > 0
        assert outcomes.tpot_seconds > 0.01


async def test_signals_say_what_waits_runs_and_rests() -> None:
    async with fleet() as f:
        f.scripts["a"] = Script([*b"abc"], hold=True)
        f.tables(table("a:v1"))
        asking = asyncio.create_task(f.ask())
        await soon(lambda: bool(f.replicas) and f.replicas["a"].running == 1)
        signals = f.m.signals()
        assert (signals.waiting, signals.running, signals.idle_s) == (0, 1, 0.0)
        asking.cancel()
        await asyncio.wait([asking])
        await soon(lambda: f.m.here == 0)
        await asyncio.sleep(0.05)
        signals = f.m.signals()
        assert (signals.waiting, signals.running) == (0, 0)
        assert 0.04 < signals.idle_s < 60


async def test_a_stream_that_waits_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.gateway.http.respond.KEEP_ALIVE_S", 0.03)
    async with fleet() as f:
        f.tables(table(asleep=True))
        await soon(lambda: f.m.current is not None)
        asking = asyncio.create_task(f.ask(stream=True))
        await soon(lambda: f.m.signals().waiting == 1)
        await asyncio.sleep(0.5)
        f.tables(table("a:v1"))
        answer = await asking
        assert answer.text.startswith(": waiting\n\n: waiting\n\n")
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["x-toque-model-version"] == "digest-v1"


async def test_waiting_is_bounded_and_says_why() -> None:
    async with fleet(load_wait_s=0.2) as f:
        f.tables(table(asleep=True, reason="no room: 900 MB are needed, 300 MB are free"))
        answer = await f.ask()
        assert answer.status_code == 503
        assert "300 MB are free" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        f.tables(table(shares={}, reason="it was stopped"))
        answer = await f.ask()
        assert answer.status_code == 503
        assert "it was stopped" in answer.json()["error"]["message"]
