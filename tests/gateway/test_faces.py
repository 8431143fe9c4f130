"""Tokenizers of sleeping models are let go of, and are there again when somebody asks. Held memory is told by weak
references: of what nobody refers to, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from fixtures.parrot import make_parrot
from toque.config import load_settings
from toque.errors import ModelError
from toque.gateway import faces, fleet_port
from toque.gateway.face import load_face
from toque.routing.base import ReplicaState, ServedVersion
from toque.routing.fake import FakeEngineClient, Script

from .scripted_fleet import Fleet, fleet, table
from .world import soon

ASLEEP = table(asleep=True)


def held(f: Fleet) -> list[weakref.ref[Any]]:
    face = f.m.current
    assert face is not None
    return [weakref.ref(face), weakref.ref(face.tokenizer), weakref.ref(face.template)]


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


async def known(f: Fleet) -> None:
    await soon(lambda: "m" in f.gateway.deployments and f.m.current is not None)


async def test_a_sleeping_models_tokenizer_is_released_and_read_again_for_who_wakes_it() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        assert await f.said() == "v1"
        f.tables(ASLEEP)
        references = held(f)
        f.m.rest(60.0)
        assert alive(references) == 3
        f.m.rest(0.0)
        assert alive(references) == 0
        assert f.m.current is None
        # What is told of it needs no tokenizer.
        models = (await f.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["version"]) for model in models] == [("m", "digest-v1")]
        assert await f.status("/ready") == 200
        assert (await f.client.post("/v1/embeddings", json={"model": "m", "input": "x"})).status_code == 400
        assert f.loads == ["v1"]
        f.link.on_report = lambda signals: f.tables(table("b:v1")) if signals.waiting else None
        answers = await asyncio.gather(*(f.ask() for _ in range(5)))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["v1"] * 5
        assert f.loads == ["v1", "v1"]


async def test_what_another_gateway_wakes_is_read_before_anybody_asks() -> None:
    async with fleet() as f:
        f.tables(ASLEEP)
        await known(f)
        f.m.rest(0.0)
        f.tables(ASLEEP)  # said again, for another deployment's sake
        await asyncio.sleep(0.05)
        assert f.loads == ["v1"]
        f.tables(table("a:v1"))
        await known(f)
        assert f.loads == ["v1", "v1"]


async def test_what_is_in_use_or_awake_or_held_stays() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        await f.said()
        for present in (
            table("a:v1"),
            table("a:v1:draining", asleep=True),
            table("a:v1:starting"),
            table(held=True),
        ):
            f.tables(present)
            f.m.rest(0.0)
            assert f.m.current is not None
        f.tables(ASLEEP)
        asking = asyncio.create_task(f.ask())
        await soon(lambda: f.m.signals().waiting == 1)
        f.m.rest(0.0)
        assert f.m.current is not None
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await soon(lambda: not f.m.here)
        f.m.rest(60.0)
        assert f.m.current is not None
        f.m.rest(0.0)
        assert f.m.current is None


async def test_a_stopped_or_a_dead_deployment_rests_too() -> None:
    async with fleet() as f:
        f.tables(table("a:v1"))
        await f.said()
        f.tables(table("a:v1:dead", shares={}))
        references = held(f)
        f.m.rest(0.0)
        assert alive(references) == 0


async def test_tokenizing_reads_what_was_released_and_wakes_nobody() -> None:
    async with fleet() as f:
        f.tables(ASLEEP)
        await known(f)
        f.m.rest(0.0)
        answer = await f.client.post("/tokenize", json={"model": "m", "prompt": "ab"})
        assert answer.json()["count"] == 3
        assert f.loads == ["v1", "v1"]
        assert not [signals for signals in f.link.reports if signals.waiting]
        f.m.rest(60.0)
        assert f.m.current is not None  # it was used just now


async def test_what_cannot_be_read_again_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(load_wait_s=5) as f:
        f.tables(ASLEEP)
        await known(f)
        f.m.rest(0.0)
        f.damage = ModelError("it has changed since it was deployed")
        f.tables(table("a:v1"))
        await soon(lambda: "has changed" in f.m.reason)
        answer = await f.ask()
        assert answer.status_code == 503
        assert "has changed since it was deployed" in answer.json()["error"]["message"]
        assert f.loads == ["v1", "v1"]  # not for every request
        f.damage = None
        monkeypatch.setattr(faces, "_RETRY_S", 0.0)
        assert await f.said() == "v1"


async def test_the_gateway_looks_for_what_it_may_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_port, "REPORT_S", 0.01)
    async with fleet(rest_after_s=0.0) as f:
        f.tables(table("a:v1"), table("b:v1", name="n"))
        assert await f.said() == "v1"
        references = held(f)
        f.tables(ASLEEP, table("b:v1", name="n"))
        await soon(lambda: f.m.current is None)
        assert alive(references) == 0
        assert f.gateway.deployments["n"].current is not None


async def test_twenty_sleeping_models_hold_no_tokenizer() -> None:
    names = [f"m{n}" for n in range(20)]
    async with fleet() as f:
        f.tables(*(table(asleep=True, name=name) for name in names))
        deployments = f.gateway.deployments
        await soon(lambda: len(deployments) == 20 and all(d.current for d in deployments.values()))
        references = [weakref.ref(deployments[name].current.tokenizer) for name in names]
        for name in names[3:]:
            deployments[name].rest(0.0)
        assert alive(references) == 3


async def test_of_a_real_tokenizer_nothing_stays(tmp_path: Path) -> None:
    """No cache of ours refers to it, after it was used."""
    folder = make_parrot(tmp_path / "parrot", {"a": "b", "b": "a"}, context_length=64)
    limits = load_settings({}, environ={}).limits
    client = FakeEngineClient(Script([1]))
    face = load_face("m", ServedVersion("k", folder), client, limits)
    ids = face.tokenizer.encode("abab", add_special=False)
    assert face.codec.decode(list(ids)) == "abab"
    references = [weakref.ref(face), weakref.ref(face.tokenizer)]
    assert client.state is ReplicaState.READY
    del face
    assert alive(references) == 0
