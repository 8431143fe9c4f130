"""/admin/v1/models, versions and aliases: what they say and change, what they refuse, and who may."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from formats.gguf_builder import tiny_llama
from toque.errors import StoreError
from toque.fleet.admin import FleetAdmin
from toque.fleet.store import DeploymentRow, MemoryFleetStore, Revision
from toque.gateway.key_file import KeyFile
from toque.registry.reader import RegistryReader
from toque.registry.registry import Registry
from toque.registry.settings import RegistrySettings
from toque.registry.store import Store

from .world import Plan, World, world


@dataclass
class Models:
    w: World
    home: Path

    async def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        answer = await self.w.client.request(method, f"/admin/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
async def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Models]:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    async with world() as w:
        w.gateway.registry = RegistryReader(RegistrySettings())
        yield Models(w, tmp_path / "home")


@pytest.fixture
def two_versions(models: Models, tmp_path: Path) -> None:
    with Registry(Store(models.home)) as registry:
        for number in (1, 2):
            path = tiny_llama(n_layers=1, seed=number).write(tmp_path / f"m{number}.gguf")
            registry.register(str(path), "bot", actor="ann")


@pytest.mark.usefixtures("two_versions")
async def test_versions_and_aliases_are_shown_moved_and_retired(models: Models) -> None:
    listed = await models.call("GET", "models")
    assert [(m["name"], m["versions"], m["newest"]) for m in listed["data"]] == [("bot", 2, 2)]
    assert [v["version"] for v in (await models.call("GET", "versions?model=bot"))["data"]] == [1, 2]
    moved = await models.call("POST", "aliases/bot@live", {"version": 1})
    assert (moved["version"], [e["actor"] for e in moved["events"]]) == (1, ["anybody"])
    await models.call("POST", "aliases/bot@live", {"version": 2, "expected": 2}, status=409)
    await models.call("POST", "aliases/bot@live", {"version": 2, "expected": 1})
    assert [a["version"] for a in (await models.call("GET", "aliases?model=bot"))["data"]] == [2]
    shown = await models.call("GET", "versions/bot@live")
    assert (shown["version"]["version"], shown["version"]["created_by"]) == (2, "ann")
    assert shown["version"]["files"][0]["name"] == "m2.gguf"
    assert shown["lineage"]["system"] == "import"
    await models.call("DELETE", "versions/bot/2", status=409)
    removed = await models.call("DELETE", "aliases/bot@live")
    assert [(e["previous"], e["version"]) for e in removed["events"]] == [(None, 1), (1, 2), (2, None)]
    assert (await models.call("DELETE", "versions/bot/2"))["version"]["status"] == "ARCHIVED"
    assert [v["version"] for v in (await models.call("GET", "versions"))["data"]] == [1]
    assert len((await models.call("GET", "versions?all=true"))["data"]) == 2
    copied = await models.call("POST", "versions", {"source": "bot/1", "model": "shop", "alias": "live"})
    assert (copied["created"], copied["version"]["aliases"]) == (True, ["live"])
    assert (await models.call("POST", "versions", {"source": "bot/1", "model": "shop"}))["created"] is False


@pytest.mark.usefixtures("two_versions")
async def test_a_moved_alias_proposes_a_rollout_of_what_follows_it(models: Models) -> None:
    async def resolve(reference: str) -> Revision:
        with Registry(Store(models.home)) as registry:
            version = registry.find(reference)
        return Revision("", reference, f"/models/{version.version}", version.digest, version.reference)

    models.w.gateway.fleet = FleetAdmin(MemoryFleetStore(), resolve, lambda: None)
    assert (await models.call("POST", "aliases/bot@live", {"version": 1}))["proposed"] == []
    for name, model in (("chat", "bot@live"), ("other", "bot/1"), ("third", "models:/bot@live")):
        await models.call("POST", "deployments", {"name": name, "model": model})
    moved = await models.call("POST", "aliases/bot@live", {"version": 2})
    assert moved["proposed"] == ["chat", "third"]
    view = await models.call("GET", "deployments/chat")
    assert (view["version"], view["proposed"]["version"]) == ("bot/1", "bot/2")
    assert (view["proposed"]["reference"], view["proposed"]["by"]) == ("bot@live", "anybody")
    assert (await models.call("GET", "deployments/other"))["proposed"] is None
    rollout = await models.call("POST", "rollouts/chat", {})
    assert (rollout["old"], rollout["new"]) == ("bot/1", "bot/2")
    assert (await models.call("GET", "deployments/chat"))["proposed"] is None
    await models.call("DELETE", "aliases/bot@live")
    assert (await models.call("GET", "deployments/third"))["proposed"] is None
    # A version that is registered with the alias moves it, too.
    await models.call("POST", "versions", {"source": "bot/2", "model": "bot", "alias": "live"})
    assert (await models.call("GET", "deployments/third"))["proposed"]["version"] == "bot/2"


@pytest.mark.usefixtures("two_versions")
async def test_an_alias_moves_also_while_the_fleet_cannot_be_told(models: Models) -> None:
    class Away(MemoryFleetStore):
        async def deployments(self) -> dict[str, DeploymentRow]:
            raise StoreError("the database is away")

    async def resolve(reference: str) -> Revision:
        raise AssertionError(reference)

    models.w.gateway.fleet = FleetAdmin(Away(), resolve, lambda: None)
    moved = await models.call("POST", "aliases/bot@live", {"version": 2})
    assert (moved["version"], moved["proposed"]) == (2, [])


async def test_a_registry_that_nobody_wrote_to_is_empty_and_stays_unmade(models: Models) -> None:
    for path in ("models", "versions", "aliases"):
        assert await models.call("GET", path) == {"object": "list", "data": []}
    await models.call("GET", "versions/bot/1", status=404)
    await models.call("POST", "aliases/bot@live", {"version": 1}, status=404)
    assert not (models.home / "registry.db").exists()


@pytest.mark.usefixtures("two_versions")
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "models?x=1", None, 400),
        ("GET", "versions?all=maybe", None, 400),
        ("GET", "versions?model=../x", None, 400),
        ("GET", "versions/hf:org/repo", None, 400),
        ("GET", "versions/bot/9", None, 404),
        ("DELETE", "versions/bot/9", None, 404),
        ("GET", "aliases/bot", None, 400),
        ("GET", "aliases/bot@nothing", None, 404),
        ("DELETE", "aliases/bot@nothing", None, 404),
        ("POST", "aliases/bot@latest", {"version": 1}, 400),
        ("POST", "aliases/bot@live", {}, 400),
        ("POST", "aliases/bot@live", {"version": 0}, 400),
        ("POST", "aliases/bot@live", {"version": 1, "extra": 1}, 400),
        ("POST", "aliases/bot@live", {"version": 7}, 404),
        ("POST", "versions", {"source": "file:/etc/passwd", "model": "bot"}, 400),
        ("POST", "versions", {"source": "/etc/passwd", "model": "bot"}, 400),
        ("POST", "versions", {"source": "bot/1", "model": "../x"}, 400),
        ("POST", "versions", {"source": "bot/1", "model": "bot", "alias": "v7"}, 400),
        ("POST", "versions", {"source": "bot/1", "model": "smollm2"}, 400),
        ("POST", "versions", {"source": "bot/1", "model": "bot", "parent": "nobody"}, 404),
    ],
)
async def test_what_cannot_be_is_refused(
    models: Models, method: str, path: str, body: Any, status: int
) -> None:
    await models.call(method, path, body, status=status)


@pytest.mark.usefixtures("two_versions")
async def test_a_file_of_the_server_is_no_source_even_where_it_exists(models: Models, tmp_path: Path) -> None:
    for source in (str(tmp_path / "m1.gguf"), f"file:{tmp_path}/m1.gguf"):
        await models.call("POST", "versions", {"source": source, "model": "bot"}, status=400)


@pytest.mark.usefixtures("two_versions")
async def test_while_the_database_is_away_it_answers_503_and_recovers(models: Models) -> None:
    assert (await models.call("GET", "models"))["data"]
    reader = models.w.gateway.registry
    assert reader is not None
    reader.close()
    moved = models.home / "moved.db"
    (models.home / "registry.db").rename(moved)
    (models.home / "registry.db").write_bytes(b"no database" * 500)
    models.w.gateway.registry = RegistryReader(RegistrySettings())
    answer = await models.w.client.get("/admin/v1/models")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    moved.rename(models.home / "registry.db")
    assert (await models.call("GET", "models"))["data"]


async def test_without_a_registry_to_administer_it_says_so(parrot: World) -> None:
    answer = await parrot.client.get("/admin/v1/models")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "no_registry"


async def test_a_tenant_s_key_administers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    keys = KeyFile(tmp_path / "keys.json")
    _, key = keys.create("team")
    async with world(Plan(flags={"auth.keys_file": str(keys.path)})) as w:
        w.gateway.registry = RegistryReader(RegistrySettings())
        for method, path in (("GET", "models"), ("POST", "aliases/bot@live"), ("DELETE", "versions/bot/1")):
            answer = await w.client.request(
                method, f"/admin/v1/{path}", headers={"authorization": f"Bearer {key}"}, json={"version": 1}
            )
            assert answer.status_code == 403, (method, path)
