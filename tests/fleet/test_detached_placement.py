"""Detached placement with real, small processes: they outlive their starter, and whoever comes next takes them up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from toque.errors import EngineError
from toque.fleet.placement.base import EventKind, Observed, ReplicaSpec, loaded_mark
from toque.fleet.placement.detached import UNKNOWN_STATUS, DetachedPlacement

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STARTER = """
import asyncio, os, sys
from pathlib import Path
from toque.fleet.placement.base import ReplicaSpec
from toque.fleet.placement.detached import DetachedPlacement

async def main():
    placement = DetachedPlacement(Path(sys.argv[1]))
    await placement.ensure(ReplicaSpec("a", 1, [sys.executable, "-c", sys.argv[2]], "/nonexistent/r1"))
    (only,) = await placement.list()
    print(only.handle, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
Lines = list[tuple[str, str]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
async def placement(tmp_path: Path, lines: Lines) -> AsyncIterator[DetachedPlacement]:
    placement = DetachedPlacement(tmp_path, lambda replica_id, line: lines.append((replica_id, line)))
    yield placement
    for each in await placement.list():
        await placement.stop(each.replica_id, each.epoch, 0.0)
    await placement.close()


def spec(code: str, epoch: int = 1) -> ReplicaSpec:
    return ReplicaSpec("a", epoch, [sys.executable, "-c", code], f"/nonexistent/r{epoch}")


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "30"])


async def only(placement: DetachedPlacement) -> Observed:
    (found,) = await placement.list()
    return found


async def ended(placement: DetachedPlacement) -> Observed:
    for _ in range(500):
        if (found := await only(placement)).exit_status is not None:
            return found
        await asyncio.sleep(0.01)
    pytest.fail("it did not end")


async def orphan(folder: Path, code: str) -> int:
    """The process id of a replica whose starter was killed."""
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, str(folder), code), stdout=subprocess.PIPE
    )
    said, _ = await starter.communicate()
    assert starter.returncode == -signal.SIGKILL
    return int(said)


async def test_ensure_is_idempotent_and_stop_leaves_nothing(
    placement: DetachedPlacement, tmp_path: Path
) -> None:
    await placement.ensure(spec(SLEEP))
    first = await only(placement)
    await placement.ensure(spec(SLEEP))
    assert await only(placement) == first
    assert os.getsid(int(first.handle)) == int(first.handle)
    with pytest.raises(EngineError, match="at epoch 1, not 0"):
        await placement.ensure(spec(SLEEP, epoch=0))
    await placement.stop("a", 2, grace_s=0)  # another epoch: left alone
    assert alive(int(first.handle))
    await placement.stop("a", 1, grace_s=5)
    assert not alive(int(first.handle))
    assert await placement.list() == []
    assert os.listdir(tmp_path) == []


async def test_it_outlives_its_starter_and_the_next_one_takes_it_up(
    placement: DetachedPlacement, tmp_path: Path
) -> None:
    pid = await orphan(tmp_path, SLEEP)
    found = await only(placement)
    assert (found.replica_id, found.epoch, found.handle, found.exit_status) == ("a", 1, str(pid), None)
    await placement.ensure(spec(SLEEP))  # it is there
    assert (await only(placement)).handle == str(pid)
    events = placement.watch()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert (await first).kind is EventKind.EXITED
    await events.aclose()
    end = await ended(placement)
    assert (end.exit_status, end.last_error) == (UNKNOWN_STATUS, "it ended, nobody knows how")


async def test_a_newer_epoch_ends_what_another_process_started(
    placement: DetachedPlacement, tmp_path: Path
) -> None:
    pid = await orphan(tmp_path, SLEEP)
    await placement.ensure(spec(SLEEP, epoch=2))
    assert not alive(pid)
    assert (await only(placement)).epoch == 2


async def test_what_ended_while_nobody_looked_is_listed_with_its_last_words(
    placement: DetachedPlacement, tmp_path: Path, lines: Lines
) -> None:
    pid = await orphan(tmp_path, "import sys; sys.exit('error: tensor 7 is cut off')")
    for _ in range(500):
        if not alive(pid):
            break
        await asyncio.sleep(0.01)
    end = await only(placement)
    assert end.exit_status == UNKNOWN_STATUS
    assert end.last_error.startswith("tensor 7 is cut off")
    assert lines == [("a", "error: tensor 7 is cut off")]


async def test_another_process_that_has_the_id_by_now_is_left_alone(
    placement: DetachedPlacement, tmp_path: Path
) -> None:
    await placement.ensure(spec(SLEEP))
    path = tmp_path / "a.1.json"
    record = path.read_bytes()
    await placement.stop("a", 1, 0.0)
    other = sleeper()
    try:
        stale = record.replace(b'"created":1', b'"created":9')
        pid = record.split(b'"pid":')[1].split(b",")[0]
        path.write_bytes(stale.replace(b'"pid":' + pid, b'"pid":%d' % other.pid))
        assert (await only(placement)).exit_status == UNKNOWN_STATUS
        await placement.stop("a", 1, 0.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_two_that_share_a_folder_see_the_same(placement: DetachedPlacement, tmp_path: Path) -> None:
    other = DetachedPlacement(tmp_path, lambda *_: None)
    await placement.ensure(spec(SLEEP))
    assert await other.list() == await placement.list()
    await placement.stop("a", 1, 0.0)
    assert await other.list() == []
    await other.close()


async def test_stop_is_polite_first_and_then_it_is_not(placement: DetachedPlacement, tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n"
    await placement.ensure(spec(deaf + SLEEP))
    for _ in range(500):
        if "up" in (tmp_path / "a.1.log").read_text():
            break
        await asyncio.sleep(0.01)
    started = time.monotonic()
    await placement.stop("a", 1, grace_s=0.3)
    assert 0.3 <= time.monotonic() - started < 30  # it would sleep for 60


async def test_an_end_is_listed_with_its_last_error(placement: DetachedPlacement, lines: Lines) -> None:
    await placement.ensure(spec("import sys; print('error: bad file', file=sys.stderr); sys.exit(2)"))
    end = await ended(placement)
    assert (end.exit_status, end.last_error) == (2, "bad file (exit status 2)")
    assert lines == [("a", "error: bad file")]
    await placement.ensure(ReplicaSpec("b", 1, ["/nonexistent/program"], "/nonexistent/rb"))
    listed = {each.replica_id: each for each in await placement.list()}
    assert "cannot start /nonexistent/program" in listed["b"].last_error


async def test_what_a_replica_marks_once_it_is_loaded_outlives_it_until_it_is_stopped(
    placement: DetachedPlacement, tmp_path: Path
) -> None:
    address = str(tmp_path / "r1")
    killed = "import os, sys; open(sys.argv[1], 'w').close(); os._exit(9)"
    for epoch, mark, loaded in ((1, loaded_mark(address), True), (2, "/dev/null", False)):
        argv = [sys.executable, "-c", killed, mark]
        await placement.ensure(ReplicaSpec("a", epoch, argv, address))
        found = await ended(placement)
        assert (found.exit_status, found.loaded) == (9, loaded)
    assert "r1.loaded" not in os.listdir(tmp_path)
