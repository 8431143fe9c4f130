"""The verbs register, list, show, alias, lineage, rm, gc and catalog."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import pytest
from click.testing import CliRunner, Result

from formats.gguf_builder import tiny_llama
from toque.cli import alias, catalog, gc, lineage, list_, pull, register, rm, show
from toque.errors import ModelNotFoundError, RequestError
from toque.fleet.revisions import first_row
from toque.fleet.spec import DeploymentSpec
from toque.fleet.sql_store import SqlFleetStore
from toque.fleet.store import DeploymentRow, Proposal, Revision
from toque.registry.catalog import builtin

T = TypeVar("T")


@pytest.fixture
def models(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TOQUE_HOME", str(home))
    for name in ("TOQUE_REGISTRY_URL", "TOQUE_REGISTRY_BLOBS"):
        monkeypatch.delenv(name, raising=False)
    return [str(tiny_llama(n_layers=1, seed=n).write(tmp_path / f"m{n}.gguf")) for n in range(3)]


def call(command: click.Command, *args: str) -> Result:
    result = CliRunner().invoke(command, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def ask(command: click.Command, *args: str) -> Any:
    return json.loads(call(command, *args, "--json").output)


def test_a_model_s_life(models: list[str], tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("{}\n")
    first = ask(register.command, models[0], "--model", "bot", "--tag", "team=x", "--dataset", str(data))
    assert (first["reference"], first["created"], first["tags"]) == ("bot/1", True, {"team": "x"})
    assert Path(first["path"]).exists()
    said = call(
        register.command,
        models[1],
        "--model",
        "bot",
        "--parent",
        "bot@v1",
        "--alias",
        "live",
        "--metric",
        "acc=0.5",
    ).output
    assert "registered bot/2 (bot@live)" in said
    assert "already registered as bot/2" in call(register.command, models[1], "--model", "bot").output

    (registered,) = [entry for entry in ask(list_.command) if entry.get("registered")]
    assert (registered["name"], registered["versions"], registered["aliases"]) == ("bot", 2, {"live": 2})
    assert "bot/1" in call(list_.command).output
    assert [v["reference"] for v in ask(list_.command, "bot")] == ["bot/1", "bot/2"]
    assert "READY" in call(list_.command, "bot").output

    shown = ask(show.command, "bot@live")
    assert (shown["version"], shown["base_model"], shown["evaluations"][0]["value"]) == (2, "bot/1", 0.5)
    assert shown == ask(show.command, "bot") == ask(show.command, "bot/2")
    assert shown["digest"] in call(show.command, "bot/2").output

    tree = ask(lineage.command, "bot/2")
    assert [parent["reference"] for parent in tree["parents"]] == ["bot/1"]
    assert tree["parents"][0]["datasets"][0]["digest"].startswith("sha256:")
    assert ask(lineage.command, "bot/1")["children"] == ["bot/2"]
    text = call(lineage.command, "bot").output
    assert text.index("bot/2") < text.index("bot/1")
    assert "acc: 0.5" in text
    assert "made from it: bot/2" in call(lineage.command, "bot/1").output

    assert ask(alias.command, "bot", "live", "1")["previous"] == 2
    assert ask(alias.command, "bot", "next", "live")["version"] == 1
    with pytest.raises(RequestError, match="points to version 1"):
        call(alias.command, "bot", "live", "2", "--expect", "2")
    assert "bot@live → bot/1" in call(alias.command, "bot").output
    assert [entry["alias"] for entry in ask(alias.command, "bot")] == ["live", "next"]
    assert [(e["previous"], e["version"]) for e in ask(alias.command, "bot", "live", "--history")] == [
        (None, 2),
        (2, 1),
    ]
    assert "2 → 1" in call(alias.command, "bot", "live", "--history").output
    with pytest.raises(RequestError, match="reserved"):
        call(alias.command, "bot", "latest", "1")

    with pytest.raises(RequestError, match="bot@live"):
        call(rm.command, "bot/1")
    for name in ("live", "next"):
        call(alias.command, "bot", name, "--rm")
    assert "archived bot/1" in call(rm.command, "bot/1").output
    assert [v["status"] for v in ask(list_.command, "bot", "--all")] == ["ARCHIVED", "READY"]
    assert ask(gc.command)["local_files"] == 0
    assert ask(gc.command, "--grace", "0", "--dry-run")["local_files"] == 1
    assert "freed 1 files here" in call(gc.command, "--grace", "0").output
    assert ask(pull.command, "bot/2")["path"]


def test_a_sweep_leaves_what_a_deployment_runs(models: list[str], home: Path) -> None:
    version = ask(register.command, models[0], "--model", "bot")
    row = DeploymentRow(
        "chat",
        DeploymentSpec("chat", "bot/1"),
        (Revision("key", "bot/1", version["path"], version["digest"]),),
        "key",
    )

    async def deploy() -> None:
        store = SqlFleetStore(f"sqlite:///{home}/registry.db")
        assert await store.put(row)
        await store.close()

    asyncio.run(deploy())
    call(rm.command, "bot/1")
    assert ask(gc.command, "--grace", "0")["local_files"] == 0
    assert Path(version["path"]).exists()


def test_moving_an_alias_proposes_a_rollout_to_the_fleet_of_the_database(
    models: list[str], home: Path
) -> None:
    first = ask(register.command, models[0], "--model", "bot", "--alias", "live")
    second = ask(register.command, models[1], "--model", "bot")

    async def on_store(work: Callable[[SqlFleetStore], Awaitable[T]]) -> T:
        store = SqlFleetStore(f"sqlite:///{home}/registry.db")
        try:
            return await work(store)
        finally:
            await store.close()

    def proposed() -> Proposal | None:
        return asyncio.run(on_store(lambda store: store.deployments()))["chat"].proposed

    pinned = Revision("", "bot@live", first["path"], first["digest"], "bot/1")
    row = first_row(DeploymentSpec("chat", "bot@live"), pinned, 0.0)
    assert asyncio.run(on_store(lambda store: store.put(row)))
    assert ask(alias.command, "bot", "next", "2")["proposed"] == []
    said = call(alias.command, "bot", "live", "2").output
    assert "a rollout of chat is proposed: toque rollout start chat" in said
    found = proposed()
    assert found is not None
    assert (found.reference, found.version, found.digest) == ("bot@live", "bot/2", second["digest"])
    assert ask(alias.command, "bot", "live", "1")["proposed"] == []  # it is what runs
    assert proposed() is None
    assert "rollout of chat" in call(register.command, models[2], "--model", "bot", "--alias", "live").output
    found = proposed()
    assert found is not None
    assert found.version == "bot/3"
    call(alias.command, "bot", "live", "--rm")
    assert proposed() is None


@pytest.mark.parametrize(
    "arguments", [["--tag", "x"], ["--metric", "a=b"], ["--metric", "a=nan"], ["--alias", "v3"]]
)
def test_what_is_no_option_s_value_is_refused_before_anything_is_written(
    models: list[str], home: Path, arguments: list[str]
) -> None:
    result = CliRunner().invoke(register.command, [models[0], "--model", "bot", *arguments])
    assert result.exit_code != 0
    assert not (home / "registry.db").exists()
    assert not (home / "blobs").exists()


def test_a_model_without_versions_is_unknown(models: list[str], home: Path) -> None:
    for command in (list_.command, show.command):
        with pytest.raises(ModelNotFoundError):
            call(command, "nobody")
    assert not (home / "registry.db").exists()


def test_the_catalog_says_what_fits(models: list[str]) -> None:
    everything = ask(catalog.command)
    assert {"smollm2", "qwen3-4b", "llama3.1-8b"} <= {entry["name"] for entry in everything}
    assert [entry["size"] for entry in everything] == sorted(entry["size"] for entry in everything)
    small = ask(catalog.command, "--fits", "--memory-gb", "1")
    assert 0 < len(small) < len(everything)
    assert all(entry["memory"] <= 1e9 and entry["fits"] for entry in small)
    longer = {entry["name"]: entry["memory"] for entry in ask(catalog.command, "--context", "8192")}
    assert all(longer[entry["name"]] >= entry["memory"] for entry in everything)
    assert [entry["name"] for entry in ask(catalog.command, "coder", "7b")] == ["qwen2.5-coder-7b"]
    assert "smollm2" in call(catalog.command, "--memory-gb", "1").output
    assert "nothing fits" in call(catalog.command, "--fits", "--memory-gb", "0.01").output


def test_each_entry_of_the_catalog_is_whole_and_runs_here() -> None:
    from toque.models import supported

    for entry in builtin().values():
        assert entry.architecture in supported()
        assert entry.license
        assert 1e7 < entry.parameters < 1e12
        assert 0.25 < entry.size / entry.parameters <= 4.1  # bytes for each: 2 bits to 4 bytes
        assert entry.context >= 512
        assert (entry.kv_per_token > 0) == (entry.architecture != "bert")
