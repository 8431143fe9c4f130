"""Controllers that are killed and databases that hang, while a client reads its stream."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fixtures.postgres import Server, binaries, server
from toque.errors import UnavailableError
from toque.fleet.durable import DurableFleet
from toque.fleet.embedded import LocalFleet
from toque.fleet.link import FleetLink
from toque.fleet.resolve import resolve
from toque.fleet.spec import DeploymentSpec, Resources, RolloutPolicy, ScalingPolicy
from toque.fleet.store import Revision
from toque.routing.base import DeploymentSignals, ReplicaEntry, ReplicaState, RoutingTable
from toque.routing.session import ReplicaSession
from toque.types import EngineRequest, SamplingParams

FAKE = [sys.executable, "-m", "toque.replica.fake", "--step-s", "0.01"]
TTL_S = 1.5
WITHIN_S = 30
CONTROLLER = """
import asyncio, sys
from pathlib import Path
from toque.fleet.durable import DurableFleet

async def main():
    fake = [sys.executable, "-m", "toque.replica.fake", "--step-s", "0.01"]
    url, folder, ttl = sys.argv[1:]
    async with DurableFleet(
        url, run_folder=Path(folder), lease_ttl_s=float(ttl), command=lambda _: fake, log=lambda *_: None
    ) as fleet:
        while not fleet.controller.leading:
            await asyncio.sleep(0.01)
        print("leads", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Seen:
    """The tables that a gateway gets."""

    def __init__(self, link: FleetLink) -> None:
        self.tables: Mapping[str, RoutingTable] = {}
        link.subscribe(self._hear)

    def _hear(self, tables: Mapping[str, RoutingTable]) -> None:
        self.tables = tables

    def entries(self, name: str = "m") -> tuple[ReplicaEntry, ...]:
        table = self.tables.get(name)
        return () if table is None else table.entries

    def ready(self, name: str = "m") -> list[str]:
        """The file names of the models that replicas have ready."""
        return sorted(model_of(e) for e in self.entries(name) if e.state is ReplicaState.READY)


def model_of(entry: ReplicaEntry) -> str:
    return Path(entry.version.partition("@")[0]).name


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    for name in ("v1", "v2"):
        (tmp_path / name).write_bytes(b"weights")
    return str(tmp_path / "v1"), str(tmp_path / "v2")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:  # its path bounds a socket's name
        yield Path(name)
        for record in Path(name).glob("*.json"):
            psutil.Process(int(record.read_bytes().split(b'"pid":')[1].split(b",")[0])).kill()


@asynccontextmanager
async def fleet(url: str, folder: Path, *, control: bool = True) -> AsyncIterator[DurableFleet]:
    running = DurableFleet(
        url,
        control=control,
        run_folder=folder,
        lease_ttl_s=TTL_S,
        command=lambda revision: FAKE,
        log=lambda *_: None,
    )
    async with running:
        yield running


def spec(model: str, replicas: int = 1) -> DeploymentSpec:
    return DeploymentSpec(
        "m",
        model,
        scaling=ScalingPolicy(min_replicas=replicas, max_replicas=3),
        rollout=RolloutPolicy(strategy="surge"),
        resources=Resources(memory_mb=1),
        grace_s=20.0,
    )


async def until(condition: Callable[[], object]) -> None:
    """``WITHIN_S`` at least, by how often this process has looked: longer where it is held up itself."""
    for _ in range(int(WITHIN_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    assert condition(), f"not within {WITHIN_S} s"


@asynccontextmanager
async def stream(entry: ReplicaEntry, tokens: int) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A client's answer of ``tokens`` tokens, a hundred each second."""
    session = ReplicaSession(entry.replica_id, entry.address)
    session.start()
    await session.wait_ready(10)
    request = EngineRequest("r", (7, 8), SamplingParams(max_tokens=tokens))

    async def read() -> list[int]:
        return [token async for output in session.generate(request) for token in output.tokens]

    reading = asyncio.create_task(read())
    try:
        yield reading
    finally:
        reading.cancel()
        await session.close()


async def test_a_controller_killed_in_the_middle_of_a_rollout_is_continued_by_the_standby(
    tmp_path: Path, folder: Path, models: tuple[str, str]
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    leader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROLLER, url, str(folder), str(TTL_S)), stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    try:
        assert await leader.stdout.readline() == b"leads\n"
        async with fleet(url, folder) as standby:
            seen = Seen(standby.link)
            await standby.admin.deploy(spec(models[0], 2))
            await until(lambda: seen.ready() == ["v1", "v1"])
            assert standby.controller is not None
            assert not standby.controller.leading
            first = max(seen.entries(), key=lambda entry: entry.replica_id)
            async with stream(first, 400) as reading:
                await standby.admin.start_rollout("m", models[1])
                await until(lambda: "v2" in map(model_of, seen.entries()))
                leader.kill()
                await until(lambda: standby.controller and standby.controller.leading)
                await until(lambda: seen.ready() == ["v2", "v2"])
                assert await reading == [7, 8] * 200
            await until(lambda: len(seen.entries()) == 2)
            assert (await standby.admin.rollout("m")).phase == "done"
            epochs = [entry.epoch for entry in seen.entries()]
            assert max(epochs) > 1_000_000  # started by the second leader
            await standby.admin.delete("m")
            await until(lambda: not seen.tables)
    finally:
        if leader.returncode is None:
            leader.kill()
        await leader.wait()


async def test_a_restarted_controller_adopts_what_runs_and_disturbs_nobody(
    tmp_path: Path, folder: Path, models: tuple[str, str]
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    async with AsyncExitStack() as stack:
        async with fleet(url, folder) as first:
            seen = Seen(first.link)
            await first.admin.deploy(spec(models[0]))
            await until(lambda: seen.ready() == ["v1"])
            (before,) = seen.entries()
            (view,) = await first.admin.replicas()
            reading = await stack.enter_async_context(stream(before, 200))
        async with fleet(url, folder) as second:
            again = Seen(second.link)
            await until(lambda: again.ready() == ["v1"])
            await until(lambda: second.controller and second.controller.leading)
            assert await reading == [7, 8] * 100
            assert again.entries() == (before,)
            os.kill(int(view.handle), signal.SIGKILL)  # it is not this process's child, and yet
            await until(lambda: again.entries()[0].epoch > before.epoch)
            await until(lambda: again.ready() == ["v1"])
            await second.admin.delete("m")
            await until(lambda: not again.tables)


async def test_replicas_of_a_fleet_that_nobody_has_any_more_end_by_themselves(
    tmp_path: Path, folder: Path, models: tuple[str, str]
) -> None:
    async with DurableFleet(
        f"sqlite:///{tmp_path}/registry.db",
        run_folder=folder,
        lease_s=0.5,
        command=lambda revision: FAKE,
        deployments=[spec(models[0])],
        log=lambda *_: None,
    ) as running:
        seen = Seen(running.link)
        await until(lambda: seen.ready() == ["v1"])
        (view,) = await running.admin.replicas()
    pid = int(view.handle)
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
    os.unlink(folder / "m-0.1.json")


@pytest.mark.skipif(binaries() is None, reason="PostgreSQL's programs are not installed")
async def test_a_database_that_hangs_stops_changes_and_nothing_else(
    folder: Path, models: tuple[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="pg-") as place:
        os.chmod(place, 0o755)
        with server(Path(place)) as database:
            await _hang(database, folder, models)


async def _hang(database: Server, folder: Path, models: tuple[str, str]) -> None:
    url = database.database("registry")
    async with fleet(url, folder) as running, fleet(url, folder, control=False) as gateway:
        seen, there = Seen(running.link), Seen(gateway.link)
        await running.admin.deploy(spec(models[0]))
        await until(lambda: seen.ready() == there.ready() == ["v1"])
        (entry,) = there.entries()
        async with stream(entry, 1000) as reading:
            stopped = database.pids()
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                refused = await asyncio.gather(
                    running.admin.scale("m", 2, 2), gateway.admin.deployments(), return_exceptions=True
                )
                for error in refused:
                    assert isinstance(error, UnavailableError)
                    assert "nothing can be changed or listed now" in error.message
                assert not reading.done()
                assert there.entries() == seen.entries() == (entry,)
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            await until(lambda: running.controller and running.controller.leading)
            assert await reading == [7, 8] * 500
        assert there.entries() == (entry,)
        assert (await running.admin.deployment("m")).spec.scaling.min_replicas == 1
        await gateway.admin.scale("m", 2, 2)
        await until(lambda: there.ready() == ["v1", "v1"])
        await running.admin.delete("m")
        await until(lambda: not seen.tables)


async def test_a_gateway_without_a_controller_wakes_a_sleeping_deployment(
    tmp_path: Path, folder: Path, models: tuple[str, str]
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    sleeps = DeploymentSpec("m", models[0], scaling=ScalingPolicy(min_replicas=0))
    async with fleet(url, folder) as running, fleet(url, folder, control=False) as gateway:
        seen = Seen(gateway.link)
        await gateway.admin.deploy(sleeps)
        await until(lambda: seen.tables and seen.tables["m"].asleep)
        for _ in range(20):
            gateway.link.report("g", [DeploymentSignals("m", waiting=20, waiting_s=0.01)])
        await until(lambda: seen.ready() == ["v1"])
        assert len(await running.admin.replicas()) == 1
        await running.admin.delete("m")
        await until(lambda: not seen.tables)


@pytest.mark.slow
async def test_two_hundred_loads_leave_memory_and_descriptors_as_they_were(tmp_path: Path) -> None:
    model = tmp_path / "v1"
    await asyncio.to_thread(model.write_bytes, b"weights")
    pinned: Revision = await resolve(str(model))
    names = [f"m{n}" for n in range(4)]
    deployed = [
        (DeploymentSpec(name, str(model), resources=Resources(memory_mb=1)), pinned) for name in names
    ]
    process = psutil.Process()
    async with LocalFleet(deployed, command=lambda revision: FAKE, log=lambda *_: None) as running:
        seen = Seen(running.link)
        after: list[tuple[int, int]] = []
        for cycle in range(50):
            await until(lambda: all(seen.ready(name) == ["v1"] for name in names))
            for name in names:
                await running.admin.stop(name)
            await until(lambda: all(not _processes(seen, name) for name in names))
            if cycle in (9, 49):
                after.append((process.memory_info().rss, process.num_fds()))
            for name in names:
                await running.admin.start(name)
        (early_rss, early_fds), (late_rss, late_fds) = after
        assert late_fds <= early_fds
        assert late_rss - early_rss < 4 << 20


def _processes(seen: Seen, name: str) -> list[ReplicaEntry]:
    return [entry for entry in seen.entries(name) if entry.epoch]
