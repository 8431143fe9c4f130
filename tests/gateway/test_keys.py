"""Keys: who is let in, how they are kept, and what each may use."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import stat
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from toque.cli.keys import command
from toque.config import load_settings
from toque.errors import AuthenticationError, ConfigError, NotFoundError, StoreError
from toque.gateway.auth import RELOAD_S, KeyRing
from toque.gateway.key_file import KeyFile
from toque.gateway.quota import Allowance
from toque.gateway.serve import has_keys, with_keys_file
from toque.routing.fake import Script
from toque.types import EngineRequest

from .test_embeddings import give_vectors
from .world import Plan, soon, spoken, world


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_found_again_but_nowhere_in_the_file(keys: KeyFile) -> None:
    key, text = keys.create("alice", note="laptop", tokens_per_minute=5)
    assert keys.read() == (key,)
    assert text.startswith(key.id + "-")
    secret = text.removeprefix(key.id + "-")
    assert len(secret) >= 43
    assert secret not in keys.path.read_text()
    assert stat.S_IMODE(os.stat(keys.path).st_mode) == 0o600
    caller = KeyRing((), keys.path).caller(f"Bearer {text}")
    assert (caller.tenant, caller.key_id) == ("alice", key.id)
    assert caller.quota.allowance == Allowance(tokens_per_minute=5)
    for wrong in (text[:-1], key.id, key.digest, secret, text + "x"):
        with pytest.raises(AuthenticationError):
            KeyRing((), keys.path).caller(f"Bearer {wrong}")


@pytest.mark.parametrize("tenant", ["", "a b", "-x", "x" * 65, "a\n", "ä", "a/b"])
def test_a_tenant_is_a_plain_name(keys: KeyFile, tenant: str) -> None:
    with pytest.raises(ConfigError):
        keys.create(tenant)
    assert not keys.path.exists()


def test_bounds_of_a_key_are_checked(keys: KeyFile) -> None:
    for bound in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
        for value in (-1, 2**31):
            with pytest.raises(ConfigError, match=bound):
                keys.create("a", **{bound: value})  # type: ignore[arg-type]


def test_created_and_revoked_keys_count_without_a_restart(keys: KeyFile) -> None:
    clock = Clock()
    ring = KeyRing((), keys.path, clock=clock)
    assert ring.caller(None).tenant == ""  # nobody made a key: everybody is let in
    first, text = keys.create("a")
    clock.now += RELOAD_S
    with pytest.raises(AuthenticationError, match="needs an API key"):
        ring.caller(None)
    before = ring.caller(f"Bearer {text}")
    _, other = keys.create("b", requests_per_minute=1)
    clock.now += RELOAD_S
    assert ring.caller(f"Bearer {other}").tenant == "b"
    assert ring.caller(f"Bearer {text}") is before, "what it has used is remembered"
    keys.revoke(first.id)
    clock.now += RELOAD_S
    with pytest.raises(AuthenticationError):
        ring.caller(f"Bearer {text}")
    keys.revoke(keys.read()[0].id)
    clock.now += RELOAD_S
    for header in (None, f"Bearer {other}"):
        with pytest.raises(AuthenticationError):
            ring.caller(header)  # without any key left, nobody is let in


def test_keys_stay_when_the_file_breaks_or_goes(keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    _, text = keys.create("a")
    ring = KeyRing((), keys.path, clock=clock)
    keys.path.write_text('{"keys": [{"id": 7')
    for _ in range(3):
        clock.now += RELOAD_S
        assert ring.caller(f"Bearer {text}").tenant == "a"
    assert len(caplog.records) == 1
    keys.path.unlink()
    for _ in range(3):
        clock.now += RELOAD_S
        assert ring.caller(f"Bearer {text}").tenant == "a"
        with pytest.raises(AuthenticationError):
            ring.caller(None)
    assert len(caplog.records) == 2


BROKEN = ["", "[]", "{}", '{"keys":[{}]}', '{"keys":[{"id":"a","tenant":"b","digest":"zz","created":1}]}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_server_does_not_start_with_a_broken_file(keys: KeyFile, content: str) -> None:
    keys.path.write_text(content)
    with pytest.raises(StoreError, match=r"keys\.json"):
        KeyRing((), keys.path)


def _create(path: Path, tenant: str) -> None:
    for _ in range(5):
        KeyFile(path).create(tenant)


def test_no_change_is_lost_among_several_processes(keys: KeyFile) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_create, args=(keys.path, f"t{i}")) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(key.tenant for key in keys.read()) == [f"t{i}" for i in range(2) for _ in range(5)]
    assert len({key.id for key in keys.read()}) == 10


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path))
    run = CliRunner().invoke
    assert "no keys" in run(command, ["list"]).output
    made = run(command, ["create", "alice", "--note", "laptop", "--requests-per-minute", "60"])
    assert made.exit_code == 0
    text = made.stdout.strip()
    (key,) = KeyFile(tmp_path / "keys.json").read()
    assert text.startswith(key.id)
    listed = run(command, ["list"]).output
    assert all(word in listed for word in (key.id, "alice", "60", "default", "laptop"))
    assert text not in listed
    assert run(command, ["revoke", key.id]).exit_code == 0
    assert isinstance(run(command, ["revoke", key.id]).exception, NotFoundError)
    settings = with_keys_file(load_settings(environ={}))
    assert settings.auth.keys_file == str(tmp_path / "keys.json")
    assert has_keys(settings)
    assert not has_keys(load_settings(environ={}))


async def test_every_route_needs_a_key_but_those_on_the_list() -> None:
    """Field case BR-069."""
    async with world(Plan(flags={"auth.api_keys": ["k1"]})) as w:
        checked = set()
        for route in w.app.routes:
            path = route.path.replace("{id:path}", "parrot")
            for method in route.methods:
                answer = await w.client.request(method, path)
                if path in ("/live", "/ready", "/health", "/openapi.json", "/docs"):
                    assert answer.status_code == 200, path
                else:
                    assert answer.status_code == 401, path
                    for wrong in ("Bearer k2", "Bearer ", "Basic k1", "k1", "Bearer k1x", "\x00"):
                        headers = {"authorization": wrong}
                        assert (await w.client.request(method, path, headers=headers)).status_code == 401
                    answer = await w.client.request(method, path, headers=bearer("k1"))
                    assert answer.status_code != 401
                checked.add(path)
        assert {"/v1/chat/completions", "/v1/completions", "/metrics", "/v1/models"} <= checked
        assert (await w.client.get("/nope")).status_code == 401
        assert not w.engine.requests


async def test_the_engine_learns_the_tenant(keys: KeyFile) -> None:
    _, a = keys.create("team-a")
    _, twin = keys.create("team-a")
    _, b = keys.create("team-b")
    async with world(Plan(flags={"auth.keys_file": str(keys.path)})) as w:
        for key in (a, twin, b):
            w.client.headers = bearer(key)  # type: ignore[assignment]
            assert (await w.chat()).status_code == 200
            assert (await w.complete(stream=True)).status_code == 200
    assert [request.tenant for request in w.engine.requests] == ["team-a"] * 4 + ["team-b"] * 2


LIMITS = ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}")


async def limited(keys: KeyFile, **bounds: int) -> tuple[str, Plan]:
    _, text = keys.create("a", **bounds)  # type: ignore[arg-type]
    return text, Plan(flags={"auth.keys_file": str(keys.path)}, script=spoken("ok"))


async def test_no_tenant_goes_before_another_by_saying_so(keys: KeyFile) -> None:
    """The engine orders by priority before it takes turns among tenants."""
    _, tenant = keys.create("team-a")
    _, admin = keys.create("ops", admin=True)
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
    }
    async with world(Plan(flags={"auth.keys_file": str(keys.path)})) as w:
        for path, fields in bodies.items():
            if path == "/v1/embeddings":
                give_vectors(w)
            seen: list[EngineRequest] = w.deployment.client.requests  # type: ignore[attr-defined]
            for key, priority, status in ((tenant, -1, 403), (tenant, 5, 200), (admin, -1, 200)):
                before = len(seen)
                body = {"model": "parrot", "priority": priority, **fields}
                answer = await w.client.post(path, json=body, headers=bearer(key))
                assert answer.status_code == status, answer.text
                if status == 403:
                    assert answer.json()["error"]["param"] == "priority"
                    assert len(seen) == before
                else:
                    assert {request.priority for request in seen[before:]} == {priority}


async def test_requests_a_minute(keys: KeyFile) -> None:
    text, plan = await limited(keys, requests_per_minute=3)
    _, other = keys.create("b")
    async with world(plan, bearer(text)) as w:
        for left in (2, 1, 0):
            answer = await w.chat(stream=left == 1)
            assert answer.status_code == 200
            shown = [answer.headers[name.format("requests")] for name in LIMITS]
            assert shown[:2] == ["3", str(left)]
            assert shown[2].endswith("s")
            assert "x-ratelimit-limit-tokens" not in answer.headers
        answer = await w.chat()
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(w.engine.requests) == 3
        assert (
            await w.client.get("/v1/models")
        ).status_code == 200  # nothing is computed: nothing is counted
        w.client.headers = bearer(other)  # type: ignore[assignment]
        answer = await w.chat()
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers


async def test_tokens_a_minute_are_charged_as_used(keys: KeyFile) -> None:
    text, plan = await limited(keys, tokens_per_minute=100)
    async with world(plan, bearer(text)) as w:
        answer = await w.complete(prompt="x" * 40, max_tokens=50)
        assert answer.status_code == 200
        assert answer.json()["usage"]["total_tokens"] == 44
        remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert remaining == 100 - 10 - 50  # the estimate: a token for 4 characters, and what may be generated
        quota = w.gateway.keys.caller(f"Bearer {text}").quota
        assert dict(quota.headers())[b"x-ratelimit-remaining-tokens"] in (b"56", b"57")
        refused = await w.complete(prompt="x" * 40, max_tokens=90)
        assert refused.status_code == 429
        assert "100 tokens a minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 20
        for bad in ({"max_tokens": -1}, {"prompt": "y" * 500, "max_tokens": 1}):
            assert (await w.complete(**bad)).status_code in (400, 429)
        assert dict(quota.headers())[b"x-ratelimit-remaining-tokens"] in (b"56", b"57")
        assert quota.running == 0


async def test_requests_at_once(keys: KeyFile) -> None:
    text, plan = await limited(keys, concurrent_requests=2)
    plan.script = spoken("ok", first_delay_s=0.3)
    async with world(plan, bearer(text)) as w:
        answers = await asyncio.gather(*(w.chat() for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "concurrency_limit"
        assert (await w.chat()).status_code == 200
        assert w.gateway.keys.caller(f"Bearer {text}").quota.running == 0


async def test_the_server_s_own_bounds_hold_without_keys() -> None:
    async with world(Plan(flags={"limits.requests_per_minute": 1})) as w:
        assert (await w.chat()).status_code == 200
        assert (await w.chat()).status_code == 429
        assert json.loads((await w.chat()).content)["error"]["param"] is None


async def test_a_flooding_tenant_fills_its_own_part_of_the_queue_only(keys: KeyFile) -> None:
    _, flood = keys.create("flood")
    _, other = keys.create("other")
    flags = {"auth.keys_file": str(keys.path), "limits.max_queued_requests": 4}

    def script(request: EngineRequest) -> Script:
        return spoken("ok", first_delay_s=600.0 if request.tenant == "flood" else 0.0)

    async with world(Plan(flags=flags, script=script)) as w:
        body = {"model": "parrot", "prompt": "x"}

        def ask(key: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(w.client.post("/v1/completions", json=body, headers=bearer(key)))

        many = [ask(flood) for _ in range(20)]
        await soon(lambda: sum(task.done() for task in many) == 16)
        answers = [await ask(other) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        refused = [task for task in many if task.done()]
        assert [task.result().status_code for task in refused] == [429] * 16
        assert w.engine.running == 4  # the others are still at it
        for task in many:
            task.cancel()
        await soon(lambda: w.engine.running == 0)
