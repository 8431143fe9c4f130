"""Replica processes that are killed, stopped, orphaned or damaged, behind a pool that keeps serving."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fixtures.fleet import PooledFleet
from toque.errors import UnavailableError
from toque.fleet.health import HangBounds
from toque.replica.fake import HANGS, KILLS
from toque.routing.base import EngineClient, ReplicaState
from toque.routing.pool import _WATCH_S, SILENCE_S
from toque.types import EngineRequest, SamplingParams

COMMAND = [sys.executable, "-m", "toque.replica.fake", "--step-s", "0.01"]


def deployment(*options: str, replicas: int = 1, bounds: HangBounds | None = None) -> PooledFleet:
    return PooledFleet([*COMMAND, *options], replicas=replicas, bounds=bounds)


@pytest.fixture
async def one() -> AsyncIterator[PooledFleet]:
    async with deployment() as running:
        await running.wait_ready(20)
        yield running


def request(*prompt: int, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(f"r{prompt[0]}", prompt, SamplingParams(max_tokens=max_tokens))


async def collect(pool: EngineClient, asked: EngineRequest) -> list[int]:
    return [token async for output in pool.generate(asked) for token in output.tokens]


async def until(condition: Callable[[], object], within_s: float) -> float:
    started = time.monotonic()
    for _ in range(int(within_s / 0.01)):
        if condition():
            break
        await asyncio.sleep(0.01)
    assert condition(), f"not within {within_s} s"
    return time.monotonic() - started


def pid(running: PooledFleet, index: int = 0) -> int:
    return running.sessions[index].pid


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_killed_in_the_middle_started_streams_go_on_in_its_successor(one: PooledFleet) -> None:
    streams = [one.pool.generate(request(i, 9, i + 1, max_tokens=60)) for i in range(4)]
    for stream in streams:
        await anext(stream)
    os.kill(pid(one), signal.SIGKILL)
    for i, stream in enumerate(streams):
        # Nothing is said twice and nothing is left out.
        assert [token async for output in stream for token in output.tokens] == ([i, 9, i + 1] * 20)[1:]
    # Sent while nothing is there to take it: it waits for the new process and never notices.
    assert await collect(one.pool, request(7)) == [7] * 5
    assert one.restarts == 1
    assert one.pool.state is ReplicaState.READY


async def test_what_a_dead_replica_had_waiting_and_running_is_answered_by_the_other() -> None:
    async with deployment(replicas=2) as running:
        await until(lambda: [s.state for s in running.sessions] == [ReplicaState.READY] * 2, 20)
        first, second = running.sessions
        asked = [asyncio.create_task(collect(running.pool, request(i, max_tokens=100))) for i in range(150)]
        # Each runs 64 at once: what comes after them has not begun when it dies.
        await until(lambda: (first.in_flight, second.in_flight) == (75, 75), 20)
        await asyncio.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
        assert await asyncio.gather(*asked) == [[i] * 100 for i in range(150)]


async def test_a_request_that_kills_its_replica_does_not_kill_for_ever(one: PooledFleet) -> None:
    with pytest.raises(UnavailableError, match="went away"):
        await collect(one.pool, request(KILLS))
    assert one.restarts <= 2
    assert await collect(one.pool, request(3)) == [3] * 5


async def test_a_stopped_replica_is_degraded_within_seconds_and_ready_when_it_goes_on() -> None:
    async with deployment(bounds=HangBounds(silent_s=60)) as running:
        await running.wait_ready(20)
        stopped = pid(running)
        os.kill(stopped, signal.SIGSTOP)
        try:
            await until(lambda: running.pool.state is ReplicaState.DEGRADED, 30)
            assert "said nothing for" in running.pool.reason
        finally:
            os.kill(stopped, signal.SIGCONT)
        await until(lambda: running.pool.state is ReplicaState.READY, 20)
        assert await collect(running.pool, request(3)) == [3] * 5
        assert pid(running) == stopped


async def test_a_stopped_replica_is_replaced_and_what_had_not_begun_is_answered() -> None:
    async with deployment(bounds=HangBounds(silent_s=2)) as running:
        await running.wait_ready(20)
        stopped = pid(running)
        os.kill(stopped, signal.SIGSTOP)
        assert await collect(running.pool, request(3)) == [3] * 5
        assert not alive(stopped)


async def test_streams_on_a_stopped_replica_move_to_another_within_seconds() -> None:
    async with deployment(replicas=2, bounds=HangBounds(silent_s=60)) as running:
        await until(lambda: [s.state for s in running.sessions] == [ReplicaState.READY] * 2, 20)
        streams = [asyncio.create_task(collect(running.pool, request(i, max_tokens=150))) for i in range(8)]
        stopped, other = running.sessions
        await until(lambda: stopped.in_flight == other.in_flight == 4, 20)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(50):  # it is not replaced before it has been silent for 60 s
                assert await asyncio.gather(*streams) == [[i] * 150 for i in range(8)]
            assert not stopped.in_flight
            # Out of rotation: with nothing to do it would be the least loaded.
            assert await collect(running.pool, request(3)) == [3] * 5
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        await until(lambda: len(running.pool.in_rotation()) == 2, 20)
        await until(lambda: stopped.stats().running == 0, 20)  # it has been told that nobody waits any more


async def test_a_stopped_replica_is_out_of_rotation_within_two_seconds() -> None:
    async with deployment(replicas=2, bounds=HangBounds(silent_s=60)) as running:
        await until(lambda: [s.state for s in running.sessions] == [ReplicaState.READY] * 2, 20)
        stopped = running.sessions[0].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            await until(lambda: len(running.pool.in_rotation()) == 1, 20)
            # Two seconds where this process is not held up itself: what it may be silent, and the next look.
            assert SILENCE_S + _WATCH_S < 2
        finally:
            os.kill(stopped, signal.SIGCONT)


async def test_a_step_that_hangs_is_degraded_while_the_process_still_talks() -> None:
    async with deployment("--stall-s", "0.5", bounds=HangBounds(degraded_s=1)) as running:
        await running.wait_ready(20)
        hanging = asyncio.create_task(collect(running.pool, request(HANGS)))
        await until(lambda: running.pool.state is ReplicaState.DEGRADED, 20)
        assert "no step finishes" in running.pool.reason
        # It is tried once more on the replica's successor, which hangs too, and then given up.
        with pytest.raises(UnavailableError, match="went away"):
            await hanging
        await until(lambda: running.restarts == 2, 20)
        assert await collect(running.pool, request(3)) == [3] * 5


async def test_a_model_that_cannot_load_is_what_the_user_is_shown() -> None:
    async with deployment("--refuse", "blk.3.attn_q.weight: the file ends in the middle of it") as running:
        with pytest.raises(UnavailableError, match=r"blk\.3\.attn_q\.weight: the file ends in the middle"):
            await running.wait_ready(20)
        assert running.pool.state is ReplicaState.DEAD
        with pytest.raises(UnavailableError, match="the file ends in the middle"):
            await collect(running.pool, request(1))


async def test_closing_lets_streams_finish_and_leaves_nothing_behind() -> None:
    running = deployment()
    await running.start()
    await running.wait_ready(20)
    process = pid(running)
    answer = asyncio.create_task(collect(running.pool, request(1, max_tokens=200)))
    await until(lambda: running.pool.stats().running == 1, 20)
    await running.close()
    assert await answer == [1] * 200
    assert not alive(process)
    with pytest.raises(UnavailableError):
        await collect(running.pool, request(1))


PARENT = """
import asyncio, sys, uvloop
from toque.fleet.embedded import LocalFleet
from toque.fleet.spec import DeploymentSpec
from toque.fleet.store import Revision

async def main():
    fake = [sys.executable, "-m", "toque.replica.fake"]
    deployed = [(DeploymentSpec("m", "/m"), Revision("", "/m", "/m"))]
    async with LocalFleet(deployed, command=lambda _: fake, log=lambda *_: None) as running:
        while not (view := (await running.admin.replicas())[0]).ready_at:
            await asyncio.sleep(0.01)
        print(view.handle, flush=True)
        await asyncio.sleep(60)

uvloop.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_no_orphan_whatever_way_the_parent_dies(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # it cannot tidy up
    parent = start("-c", PARENT)
    try:
        assert parent.stdout is not None
        replica = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(replica)
        parent.send_signal(how)
        parent.wait()
        await until(lambda: not alive(replica), 15)
    finally:
        stop(parent)


async def test_a_replica_nobody_wants_ends_by_itself(tmp_path: Path) -> None:
    replica = start(*COMMAND[1:], "--socket", str(tmp_path / "new" / "r"), "--lease-s", "0.5")
    try:
        await until(lambda: replica.poll() is not None, 30)
        assert replica.returncode == 0
    finally:
        stop(replica)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
