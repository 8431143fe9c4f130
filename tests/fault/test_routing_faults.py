"""Real replica processes under constant traffic from the official client, with routing tables made by hand.

Whatever happens to the replicas, no request fails, and every text is the one that an undisturbed run gives.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from fixtures.parrot import make_parrot
from toque.config import load_settings
from toque.gateway.app import create_app
from toque.gateway.deployment import Deployment, FleetDeployment
from toque.gateway.fleet_port import FleetPort
from toque.gateway.listen import bind
from toque.gateway.polling import wait_until
from toque.gateway.server import GatewayServer
from toque.routing.base import DeploymentSignals, ReplicaEntry, ReplicaState, RoutingTable, ServedVersion

TOKENS = 60
STREAMS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model that babbles: v1 in small letters, v2 in large ones."""
    folder = tmp_path_factory.mktemp("babblers")
    made = {}
    for version, letters in (("v1", "abcdefgh"), ("v2", "ABCDEFGH")):
        source = random.Random(version)
        following: dict[Any, Any] = {
            letter: {other: source.uniform(0, 3) + 18 for other in letters} for letter in letters
        }
        following["!"] = dict.fromkeys(letters, 20.0)
        made[version] = make_parrot(folder / version, following)
    return made


@dataclass
class Process:
    """A replica process, started by hand."""

    version: str
    entry: ReplicaEntry
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@dataclass
class HandMade:
    """The gateway's link to a fleet that is this test."""

    on_tables: Callable[[Mapping[str, RoutingTable]], None] = lambda tables: None
    heard: DeploymentSignals = field(default_factory=lambda: DeploymentSignals("m"))
    wakes: int = 0
    on_wake: Callable[[], None] = lambda: None

    def subscribe(self, on_tables: Callable[[Mapping[str, RoutingTable]], None]) -> Callable[[], None]:
        self.on_tables = on_tables
        return lambda: None

    def report(self, gateway_id: str, signals: Sequence[DeploymentSignals]) -> None:
        for each in signals:
            self.heard = each
            if each.waiting:
                self.on_wake()


@dataclass
class Fleet:
    models: dict[str, Path]
    sockets: Path
    url: str
    link: HandMade
    deployment: Callable[[], FleetDeployment]
    processes: list[Process] = field(default_factory=list)
    epochs: int = 0
    shares: dict[str, float] = field(default_factory=lambda: {"v1": 1.0})
    fields: dict[str, Any] = field(default_factory=dict)

    def start(self, version: str = "v1") -> Process:
        """A new process, which becomes ready by itself."""
        self.epochs += 1
        address = str(self.sockets / f"r{self.epochs}")
        command = [sys.executable, "-m", "toque.replica", "--model", str(self.models[version])]
        command += ["--socket", address, "--name", f"r{self.epochs}", "--parent-pid", str(os.getpid())]
        command += ["--backend", "reference", "--kv-blocks", "256", "--threads", "1"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        entry = ReplicaEntry(f"r{self.epochs}", self.epochs, address, version=version)
        self.processes.append(made := Process(version, entry, process))
        self.say()
        return made

    def say(self) -> None:
        """The table as things are; without replicas whose process has ended."""
        entries = tuple(p.entry for p in self.processes if p.process.poll() is None)
        versions = {key: ServedVersion(key, path, label=key) for key, path in self.models.items()}
        self.link.on_tables({"m": RoutingTable("m", entries, versions, self.shares, **self.fields)})

    def mark(self, process: Process, state: ReplicaState) -> None:
        process.entry = replace(process.entry, state=state)

    async def until_ready(self, *processes: Process) -> None:
        await until(
            lambda: all(
                p.entry.replica_id in {key[0] for key in self.deployment().pool.in_rotation(p.version)}
                for p in processes
            )
        )

    def reap(self) -> None:
        for process in self.processes:
            process.process.kill()
            process.process.wait()


@dataclass
class Traffic:
    """Streams that follow one another, ``STREAMS`` at a time; each text is compared with the undisturbed one's."""

    fleet: Fleet
    expected: dict[tuple[str, int], str]
    texts: int = 0
    by_version: dict[str, int] = field(default_factory=lambda: {"v1": 0, "v2": 0})
    wrong: list[str] = field(default_factory=list)
    over: bool = False

    async def run(self, client: openai.AsyncOpenAI, number: int) -> None:
        seed = number
        while not self.over:
            seed = (seed + STREAMS) % 24
            try:
                text, version = await ask(client, seed)
            except openai.OpenAIError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            if text != self.expected[version, seed]:
                self.wrong.append(f"{version} {seed}: {text!r} is not {self.expected[version, seed]!r}")
            self.texts += 1
            self.by_version[version] += 1

    async def more(self, count: int = STREAMS) -> None:
        """Until so many more answers have come."""
        goal = self.texts + count
        await until(lambda: self.texts >= goal or bool(self.wrong))
        assert not self.wrong


async def ask(client: openai.AsyncOpenAI, seed: int) -> tuple[str, str]:
    """The text, and the version that its letters show."""
    asked: dict[str, Any] = {
        "model": "m",
        "prompt": "go!",
        "max_tokens": TOKENS,
        "seed": seed,
        "temperature": 1.0,
    }
    stream = await client.completions.create(
        **asked, stream=True, frequency_penalty=0.3, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, TOKENS), text
    return text, "v1" if text.islower() else "v2"


async def until(condition: Callable[[], object], within_s: float = 60) -> None:
    assert await wait_until(lambda: bool(condition()), within_s), "it did not happen in time"


@asynccontextmanager
async def serving(models: dict[str, Path], sockets: Path) -> AsyncIterator[Fleet]:
    settings = load_settings({"server.port": 0, "ledger.enabled": False}, environ={})
    deployments: dict[str, Deployment] = {}
    app = create_app(deployments, settings)
    listener = bind(settings.server, has_keys=False)
    link = HandMade()
    port = FleetPort(deployments, link, settings.limits, app.state.gateway.latencies)
    port.start()
    server = GatewayServer(app, settings.server, settings.limits.max_header_bytes)
    task = asyncio.create_task(server.serve([listener]))

    def deployment() -> FleetDeployment:
        found = deployments["m"]
        assert isinstance(found, FleetDeployment)
        return found

    fleet = Fleet(models, sockets, f"http://127.0.0.1:{listener.getsockname()[1]}/v1", link, deployment)
    try:
        yield fleet
    finally:
        server.stop()
        server.stop()
        await task
        await port.close()
        app.state.gateway.close()
        fleet.reap()


@asynccontextmanager
async def traffic(fleet: Fleet, *versions: str) -> AsyncIterator[Traffic]:
    """Undisturbed texts first, then the streams."""
    async with openai.AsyncOpenAI(api_key="x", base_url=fleet.url, max_retries=0, timeout=60) as client:
        expected = {}
        for version in versions:
            fleet.shares = {version: 1.0}
            fleet.say()
            texts = await asyncio.gather(*(ask(client, seed) for seed in range(24)))
            expected |= {(found, seed): text for seed, (text, found) in enumerate(texts)}
        assert {version for version, _ in expected} == set(versions)
        fleet.shares = {versions[0]: 1.0}
        fleet.say()
        running = Traffic(fleet, expected)
        workers = [asyncio.create_task(running.run(client, number)) for number in range(STREAMS)]
        try:
            await running.more()
            yield running
            await running.more()
        finally:
            running.over = True
            await asyncio.gather(*workers)
        assert not running.wrong


async def test_killed_at_random_moments_no_request_fails_and_no_text_differs(
    models: dict[str, Path], tmp_path: Path
) -> None:
    source = random.Random(1)
    async with serving(models, tmp_path) as fleet:
        pair = [fleet.start(), fleet.start()]
        await fleet.until_ready(*pair)
        async with traffic(fleet, "v1") as running:
            for _ in range(6):
                await asyncio.sleep(source.uniform(0, 0.4))
                victim = pair.pop(source.randrange(2))
                victim.send(signal.SIGKILL)
                victim.process.wait()
                pair.append(fleet.start())
                await running.more(4)
                await fleet.until_ready(*pair)


async def test_stopped_it_is_out_of_rotation_and_its_streams_move(
    models: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(models, tmp_path) as fleet:
        stopped, other = fleet.start(), fleet.start()
        await fleet.until_ready(stopped, other)
        async with traffic(fleet, "v1") as running:
            stopped.send(signal.SIGSTOP)
            await until(lambda: len(fleet.deployment().pool.in_rotation("v1")) == 1)
            await running.more(2 * STREAMS)
            stopped.send(signal.SIGCONT)
            await fleet.until_ready(stopped, other)
            await running.more(2 * STREAMS)


async def test_twenty_rolling_updates_in_a_row_cut_no_stream(models: dict[str, Path], tmp_path: Path) -> None:
    """Field case BR-076, with SIGTERM to what is being replaced at the end."""
    async with serving(models, tmp_path) as fleet:
        old, new = fleet.start("v1"), fleet.start("v2")
        await fleet.until_ready(old, new)
        async with traffic(fleet, "v1", "v2") as running:
            for _ in range(20):
                # Shift, then drain: the old one takes nothing more and finishes what it has.
                fleet.mark(old, ReplicaState.DRAINING)
                fleet.mark(new, ReplicaState.STARTING)
                fleet.shares = {new.version: 1.0}
                fleet.say()
                await running.more(3)
                old, new = new, old
            fleet.mark(new, ReplicaState.STARTING)
            fleet.shares = {new.version: 1.0}
            fleet.say()
            old.send(signal.SIGTERM)
            await until(lambda: old.process.poll() is not None)
            assert old.process.returncode == 0
        assert min(running.by_version.values()) > 10


async def test_a_swap_in_place_holds_arrivals_and_mixes_no_versions(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Field cases BR-052 and BR-078: there is room for one; the old one ends what it has before the new one starts."""
    async with serving(models, tmp_path) as fleet:
        first, second = fleet.start("v1"), fleet.start("v2")
        await fleet.until_ready(first, second)
        async with traffic(fleet, "v1", "v2") as running:
            second.process.kill()
            second.process.wait()
            fleet.say()
            for version in ("v2", "v1"):
                fleet.fields = {"held": True}
                fleet.mark(first, ReplicaState.DRAINING)
                fleet.say()
                first.send(signal.SIGTERM)
                await until(lambda old=first: old.process.poll() is not None)
                assert first.process.returncode == 0
                fleet.shares = {version: 1.0}
                first = fleet.start(version)
                await fleet.until_ready(first)
                fleet.fields = {}
                fleet.say()
                await running.more()
        assert min(running.by_version.values()) > 4


async def test_twenty_requests_at_a_sleeping_model_start_one_replica(
    models: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(models, tmp_path) as fleet:
        fleet.fields = {"asleep": True}
        fleet.say()
        starts = 0

        def wake() -> None:
            nonlocal starts
            if fleet.fields:
                starts += 1
                fleet.fields = {}
                fleet.start()

        fleet.link.on_wake = wake
        async with openai.AsyncOpenAI(api_key="x", base_url=fleet.url, max_retries=0, timeout=60) as client:
            answers = await asyncio.gather(*(ask(client, seed) for seed in range(20)))
        assert starts == 1
        assert {version for _, version in answers} == {"v1"}
        assert len({text for text, _ in answers}) == 20
