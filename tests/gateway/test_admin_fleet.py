"""/admin/v1/deployments, replicas and rollouts: what they change, what they refuse, and who may."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from toque.errors import ModelNotFoundError, StoreError
from toque.fleet.admin import FleetAdmin
from toque.fleet.rollout import Phase
from toque.fleet.store import DeploymentRow, MemoryFleetStore, Revision
from toque.gateway.key_file import KeyFile

from .world import Plan, World, world


@dataclass
class Fleet:
    """A gateway with a fleet to administer, in memory, and no controller: what is written stays as it is."""

    w: World
    store: MemoryFleetStore
    changes: list[str] = field(default_factory=list)

    async def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        if body is None and method == "POST":
            body = {}
        answer = await self.w.client.request(method, f"/admin/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def row(self, name: str) -> DeploymentRow:
        return (await self.store.deployments())[name]


async def resolve(reference: str) -> Revision:
    if reference.startswith("missing"):
        raise ModelNotFoundError(f"there is no model {reference}", param="model")
    return Revision("", reference, f"/models/{reference}", f"sha256:{reference}", reference)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with world() as w:
        store = MemoryFleetStore()
        made = Fleet(w, store)
        w.gateway.fleet = FleetAdmin(store, resolve, lambda: made.changes.append("changed"))
        yield made


async def test_a_deployment_is_made_shown_scaled_stopped_and_ended(fleet: Fleet) -> None:
    made = await fleet.call("POST", "deployments", {"name": "chat", "model": "m1", "grace_s": 5})
    assert (made["name"], made["version"], made["spec"]["grace_s"]) == ("chat", "m1", 5)
    assert fleet.changes == ["changed"]
    listed = await fleet.call("GET", "deployments")
    assert [d["name"] for d in listed["data"]] == ["chat"]
    scaled = await fleet.call("POST", "deployments/chat/scale", {"min_replicas": 2})
    assert scaled["spec"]["scaling"]["min_replicas"] == 2
    assert scaled["spec"]["scaling"]["max_replicas"] == 2
    assert (await fleet.call("POST", "deployments/chat/stop"))["status"] == "stopped"
    assert (await fleet.row("chat")).stopped
    assert (await fleet.call("POST", "deployments/chat/start"))["status"] != "stopped"
    assert (await fleet.call("GET", "deployments/chat"))["generation"] == 4
    assert await fleet.call("DELETE", "deployments/chat") == {"name": "chat", "deleted": True}
    assert (await fleet.row("chat")).deleted


async def test_a_rollout_is_started_paused_resumed_promoted_and_undone(fleet: Fleet) -> None:
    await fleet.call("POST", "deployments", {"name": "chat", "model": "m1"})
    await fleet.call("GET", "rollouts/chat", status=404)
    body = {"model": "m2", "policy": {"strategy": "canary", "steps": [0.1]}}
    begun = await fleet.call("POST", "rollouts/chat", body)
    assert (begun["old"], begun["new"], begun["strategy"]) == ("m1", "m2", "canary")
    row = await fleet.row("chat")
    assert row.rollout is not None
    await fleet.store.put(replace(row, rollout=replace(row.rollout, phase=Phase.TESTING)))
    assert (await fleet.call("POST", "rollouts/chat/pause"))["paused"] is True
    assert (await fleet.call("POST", "rollouts/chat/resume"))["paused"] is False
    await fleet.call("POST", "rollouts/chat/promote")
    assert [r["deployment"] for r in (await fleet.call("GET", "rollouts"))["data"]] == ["chat"]
    conflict = await fleet.call("POST", "rollouts/chat", {"model": "m3"}, status=409)
    assert "rolling out" in conflict["error"]["message"]
    undone = await fleet.call("POST", "rollouts/chat/undo")
    assert undone["phase"].startswith("ret")


async def test_a_restart_takes_engine_options(fleet: Fleet) -> None:
    await fleet.call("POST", "deployments", {"name": "chat", "model": "m1"})
    await fleet.call("POST", "deployments/chat/restart", {"engine": {"threads": 1}})
    assert (await fleet.row("chat")).spec.engine == {"threads": 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("deployments", {"name": "a", "model": "b", "scalin": {}}, 400, "scalin"),
        ("deployments", {"name": "a", "model": "b", "scaling": {"max": 1}}, 400, "scaling.max"),
        ("deployments", {"name": "a", "model": "b", "engine": {"threads": "x"}}, 400, "engine.threads"),
        ("deployments", {"name": "a"}, 400, "model"),
        ("deployments", {"name": "a", "model": "missing"}, 404, "model"),
        ("deployments", [], 400, None),
        ("deployments/chat/scale", {}, 400, "min_replicas"),
        ("deployments/chat/scale", {"min": 1}, 400, "min"),
        ("deployments/chat/scale", {"min_replicas": 3, "max_replicas": 2}, 400, "scaling.min_replicas"),
        ("deployments/chat/scale", {"min_replicas": -1}, 400, "min_replicas"),
        ("deployments/none/scale", {"min_replicas": 1}, 404, "deployment"),
        ("deployments/chat/stop", {"now": True}, 400, "now"),
        ("deployments/chat/restart", {"engine": {"thread": 1}}, 400, "engine.thread"),
        ("rollouts/chat", {"policy": {"step": 1}}, 400, "policy.step"),
        ("rollouts/chat", {"model": "missing"}, 404, "model"),
        ("rollouts/chat/pause", {}, 409, None),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    fleet: Fleet, path: str, body: Any, status: int, param: str | None
) -> None:
    await fleet.call("POST", "deployments", {"name": "chat", "model": "m1"})
    before = await fleet.store.deployments()
    answer = await fleet.call("POST", path, body, status=status)
    assert answer["error"]["param"] == param, answer
    assert await fleet.store.deployments() == before


async def test_replicas_are_listed_by_deployment(fleet: Fleet) -> None:
    assert (await fleet.call("GET", "replicas"))["data"] == []
    answer = await fleet.call("GET", "replicas?deployment=none", status=404)
    assert "'none'" in answer["error"]["message"]
    assert (await fleet.call("GET", "replicas?deploy=a", status=400))["error"]["param"] == "deploy"


async def test_a_page_elsewhere_cannot_make_a_browser_change_anything(fleet: Fleet) -> None:
    await fleet.call("POST", "deployments", {"name": "chat", "model": "m1"})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = await fleet.w.client.post(
            "/admin/v1/deployments/chat/stop", content=b"{}", headers={"content-type": kind}
        )
        assert answer.status_code == 400
    assert not (await fleet.row("chat")).stopped


async def test_nothing_is_changed_while_the_store_is_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreError("the database does not answer")

    monkeypatch.setattr(fleet.store, "put", away)
    monkeypatch.setattr(fleet.store, "deployments", away)
    for method, path in (("GET", "deployments"), ("POST", "deployments/chat/stop")):
        answer = await fleet.w.client.request(method, f"/admin/v1/{path}", json={})
        assert answer.status_code == 503
        assert "serving goes on" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    assert (await fleet.w.complete()).status_code == 200


async def test_a_server_without_a_fleet_says_so(parrot: World) -> None:
    answer = await parrot.client.get("/admin/v1/deployments")
    assert answer.status_code == 404
    assert "no fleet" in answer.json()["error"]["message"]


async def test_a_tenants_key_asks_models_and_administers_nothing(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    _, tenant = file.create("acme")
    _, admin = file.create("ops", admin=True)
    flags = {"auth.keys_file": str(file.path), "auth.api_keys": ("operator",)}
    async with world(Plan(flags=flags)) as w:
        w.gateway.fleet = FleetAdmin(MemoryFleetStore(), resolve, lambda: None)

        async def ask(key: str, path: str) -> httpx.Response:
            return await w.client.get(path, headers={"authorization": f"Bearer {key}"})

        refused = await ask(tenant, "/admin/v1/deployments")
        assert refused.status_code == 403
        assert "--admin" in refused.json()["error"]["message"]
        assert (await ask(tenant, "/v1/models")).status_code == 200
        assert (await ask(admin, "/admin/v1/deployments")).status_code == 200
        assert (await ask("operator", "/admin/v1/replicas")).status_code == 200
        assert (await w.client.get("/admin/v1/rollouts")).status_code == 401
