"""Local placement with real, small processes: idempotent, fenced by epoch, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from toque.errors import EngineError
from toque.fleet.placement import local
from toque.fleet.placement.base import PARENT_PID, EventKind, Observed, ReplicaSpec, loaded_mark
from toque.fleet.placement.local import LocalPlacement, last_error

Lines = list[tuple[str, str]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
async def placement(lines: Lines) -> AsyncIterator[LocalPlacement]:
    placement = LocalPlacement(lambda replica_id, line: lines.append((replica_id, line)))
    yield placement
    await placement.close(0)


def spec(code: str, epoch: int = 1, replica_id: str = "a", *args: str) -> ReplicaSpec:
    return ReplicaSpec(replica_id, epoch, [sys.executable, "-c", code, *args], address="/nonexistent/socket")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def observed(placement: LocalPlacement) -> Observed:
    (only,) = await placement.list()
    return only


async def ended(placement: LocalPlacement) -> Observed:
    for _ in range(500):
        if (only := await observed(placement)).exit_status is not None:
            return only
        await asyncio.sleep(0.01)
    pytest.fail("it did not end")


SLEEP = "import time; print('up', flush=True); time.sleep(60)"


async def test_ensure_is_idempotent_and_stop_ends_it(placement: LocalPlacement, lines: Lines) -> None:
    await placement.ensure(spec(SLEEP))
    first = await observed(placement)
    await placement.ensure(spec(SLEEP))
    assert await observed(placement) == first
    assert alive(int(first.handle))
    assert os.getpgid(int(first.handle)) == int(first.handle)
    await placement.stop("a", 1, grace_s=5)
    assert not alive(int(first.handle))
    assert await placement.list() == []


async def test_epochs_fence(placement: LocalPlacement) -> None:
    await placement.ensure(spec(SLEEP, epoch=2))
    old = await observed(placement)
    with pytest.raises(EngineError, match="at epoch 2, not 1"):
        await placement.ensure(spec(SLEEP, epoch=1))
    await placement.stop("a", 1, grace_s=0)  # another epoch: left alone
    assert alive(int(old.handle))
    await placement.ensure(spec(SLEEP, epoch=3))
    assert not alive(int(old.handle))
    assert (await observed(placement)).epoch == 3


async def test_stop_is_polite_first_and_then_it_is_not(placement: LocalPlacement, lines: Lines) -> None:
    polite = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
    )
    await placement.ensure(spec(polite + SLEEP))
    await seen(lines, "up")
    await placement.stop("a", 1, grace_s=10)
    assert ("a", "bye") in lines
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n"
    await placement.ensure(spec(deaf + SLEEP, epoch=2))
    pid = int((await observed(placement)).handle)
    await seen(lines, "up", 2)
    started = time.monotonic()
    await placement.stop("a", 2, grace_s=0.3)
    assert 0.3 <= time.monotonic() - started < 30  # it would sleep for 60
    assert not alive(pid)


async def test_children_of_a_replica_end_with_it(placement: LocalPlacement, lines: Lines) -> None:
    await placement.ensure(
        spec(
            "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
        )
    )
    await seen(lines, "")
    child = int(lines[0][1])
    assert alive(child)
    await placement.stop("a", 1, grace_s=0)
    for _ in range(100):
        if not alive(child):
            return
        await asyncio.sleep(0.01)
    pytest.fail("the child is still there")


async def test_an_end_is_listed_with_its_last_error_and_told_to_watchers(placement: LocalPlacement) -> None:
    events = placement.watch()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await placement.ensure(
        spec("import sys; print('error: tensor 7 is cut off\\nbye', file=sys.stderr); sys.exit(2)")
    )
    assert (await first).kind is EventKind.STARTED
    assert (await anext(events)).kind is EventKind.EXITED
    end = await ended(placement)
    assert (end.exit_status, end.last_error) == (2, "tensor 7 is cut off (exit status 2)")
    await events.aclose()


async def test_a_program_that_is_not_there_is_an_end_too(placement: LocalPlacement) -> None:
    await placement.ensure(ReplicaSpec("a", 1, ["/nonexistent/program"], "/nonexistent/socket"))
    assert "cannot start /nonexistent/program" in (await ended(placement)).last_error


async def test_long_and_undecodable_lines_are_cut(placement: LocalPlacement, lines: Lines) -> None:
    await placement.ensure(
        spec("import sys; sys.stdout.buffer.write(b'x' * 100_000 + b'\\n\\xff\\n'); sys.stdout.flush()")
    )
    await ended(placement)
    assert all(len(line) <= 4096 for _, line in lines)
    assert lines[-1] == ("a", "\ufffd")


async def test_the_parents_pid_reaches_it_and_its_secrets_do_not(
    placement: LocalPlacement, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOQUE_API_KEYS", "TOQUE_API_KEY", "TOQUE_AUTH_API_KEYS", "TOQUE_LEDGER_URL"):
        monkeypatch.setenv(name, "secret")
    code = (
        "import os, sys; leaked = [name for name in os.environ if os.environ[name] == 'secret'];"
        "print(sys.argv[1], *leaked, os.environ['EXTRA'])"
    )
    argv = [sys.executable, "-c", code, PARENT_PID]
    await placement.ensure(ReplicaSpec("a", 1, argv, "/nonexistent/socket", environment={"EXTRA": "yes"}))
    await ended(placement)
    assert lines == [("a", f"{os.getpid()} yes")]


async def test_capacity_is_this_machine(placement: LocalPlacement) -> None:
    (node,) = await placement.capacity()
    assert node.cpus >= 1
    assert 0 < node.memory_bytes <= node.total_bytes <= psutil.virtual_memory().total


async def test_in_a_container_capacity_is_what_it_may_use(
    placement: LocalPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "total_bytes", lambda: 4 << 30)
    monkeypatch.setattr(local, "available_bytes", lambda: 1 << 30)
    (node,) = await placement.capacity()
    assert (node.memory_bytes, node.total_bytes) == (1 << 30, 4 << 30)
    for name in ("total_bytes", "available_bytes"):  # a machine that does not say
        monkeypatch.setattr(local, name, lambda: None)
    (node,) = await placement.capacity()
    assert node.total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("tail", "status", "expected"),
    [
        (["error: bad"], 2, "bad (exit status 2)"),
        (["error: first", "noise", "error: last", "noise"], 1, "last (exit status 1)"),
        (["noise"], -signal.SIGKILL, "killed by SIGKILL"),
        ([], -200, "killed by signal 200"),
        (["error: x"], 0, ""),
    ],
)
def test_last_error(tail: list[str], status: int, expected: str) -> None:
    assert last_error(tail, status) == expected


async def seen(lines: Lines, text: str, times: int = 1) -> None:
    for _ in range(500):
        if sum(text in line for _, line in lines) >= times:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{text!r} was not printed {times} times: {lines}")


async def test_what_a_replica_marks_once_it_is_loaded_outlives_it_until_it_is_stopped(
    placement: LocalPlacement, tmp_path: Path
) -> None:
    address = str(tmp_path / "r1")
    killed = "import os, sys; open(sys.argv[1], 'w').close(); os._exit(9)"
    for epoch, mark, loaded in ((1, loaded_mark(address), True), (2, "/dev/null", False)):
        argv = [sys.executable, "-c", killed, mark]
        await placement.ensure(ReplicaSpec("a", epoch, argv, address))
        found = await ended(placement)
        assert (found.exit_status, found.loaded) == (9, loaded)
    assert "r1.loaded" not in os.listdir(tmp_path)
