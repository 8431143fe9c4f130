"""A gateway on a fleet that does what the test says: tables come in, reports go out, replicas are scripted."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from toque.config import load_settings
from toque.errors import ModelError
from toque.gateway.app import create_app
from toque.gateway.deployment import Deployment, FleetDeployment
from toque.gateway.face import Face
from toque.gateway.fleet_port import FleetPort
from toque.routing.base import (
    DeploymentSignals,
    EngineClient,
    ReplicaEntry,
    ReplicaState,
    RoutingTable,
    ServedVersion,
)
from toque.routing.fake import FakeEngineClient, Script
from toque.types import EngineStats, ModelCard

from .world import CONTEXT, EOS, LineTemplate, PieceTokenizer


@dataclass
class Replica(FakeEngineClient):
    """A scripted replica as a session."""

    silent_s: float = 0.0
    card: ModelCard | None = None
    on_stats: Callable[[EngineStats], None] | None = None
    on_change: Callable[[], None] = lambda: None

    def start(self) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def close(self) -> None: ...

    def become(self, state: ReplicaState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.on_change()


@dataclass
class FakeLink:
    """A fleet that does what the test says."""

    on_tables: Callable[[Mapping[str, RoutingTable]], None] = lambda tables: None
    reports: list[DeploymentSignals] = field(default_factory=list)
    on_report: Callable[[DeploymentSignals], None] = lambda signals: None

    def subscribe(self, on_tables: Callable[[Mapping[str, RoutingTable]], None]) -> Callable[[], None]:
        self.on_tables = on_tables
        return lambda: None

    def report(self, gateway_id: str, signals: Sequence[DeploymentSignals]) -> None:
        self.reports += signals
        for each in signals:
            self.on_report(each)


@dataclass
class Fleet:
    client: httpx.AsyncClient
    link: FakeLink
    port: FleetPort
    gateway: Any
    replicas: dict[str, Replica] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    damage: ModelError | None = None  # why no face can be read
    gate: threading.Event = field(default_factory=threading.Event)  # faces are loaded once it is set

    def tables(self, *tables: RoutingTable) -> None:
        self.link.on_tables({table.deployment: table for table in tables})

    @property
    def m(self) -> FleetDeployment:
        found = self.gateway.deployments["m"]
        assert isinstance(found, FleetDeployment)
        return found

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": "hi", **fields})

    async def said(self, **fields: Any) -> str:
        answer = await self.ask(**fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def status(self, path: str) -> int:
        return (await self.client.get(path)).status_code


def table(
    *replicas: str, shares: Mapping[str, float] | None = None, name: str = "m", **fields: Any
) -> RoutingTable:
    """``replicas`` are "id:version" or "id:version:state"."""
    entries = []
    for replica in replicas:
        replica_id, version, *state = replica.split(":")
        entries.append(
            ReplicaEntry(replica_id, 1, f"/{replica_id}", ReplicaState(*state or ["starting"]), "", version)
        )
    shares = {"v1": 1.0} if shares is None else shares
    keys = {*shares, *(entry.version for entry in entries)}
    versions = {key: ServedVersion(key, Path(f"/models/{key}"), digest=f"digest-{key}") for key in keys}
    return RoutingTable(name, tuple(entries), versions, shares, **fields)


@asynccontextmanager
async def fleet(*, rest_after_s: float = 60.0, **limits: Any) -> AsyncIterator[Fleet]:
    settings = load_settings({f"limits.{name}": value for name, value in limits.items()}, environ={})
    deployments: dict[str, Deployment] = {}
    app = create_app(deployments, settings)
    gateway = app.state.gateway
    link = FakeLink()

    def load(name: str, version: ServedVersion, client: EngineClient, **_: Any) -> Face:
        assert made.gate.wait(10)
        made.loads.append(version.key)
        if made.damage is not None:
            raise made.damage
        if version.key == "damaged":
            raise ModelError("tensor 7 is cut off")
        tokenizer: Any = PieceTokenizer()
        template: Any = LineTemplate()
        card = ModelCard(name, "llama", 1, "F32", CONTEXT, tokenizer.vocab_size, version.digest)
        return Face(name, client, tokenizer, template, card, settings.limits, key=version.key)

    def open_session(entry: ReplicaEntry, on_change: Callable[[], None]) -> Replica:
        script = made.scripts.get(entry.replica_id, Script([*entry.version.encode(), EOS]))
        made.replicas[entry.replica_id] = replica = Replica(script, on_change=on_change)
        return replica

    port = FleetPort(
        deployments,
        link,
        settings.limits,
        gateway.latencies,
        load=load,
        open_session=open_session,
        rest_after_s=rest_after_s,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        made = Fleet(client, link, port, gateway)
        made.gate.set()
        port.start()
        try:
            yield made
        finally:
            made.gate.set()
            await port.close()
            gateway.close()
