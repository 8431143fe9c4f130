"""A replica process around the fake engine, over either carrier."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from toque.routing.session import ReplicaSession

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """Socket paths are bounded, pytest's own temporary folders are not."""
    with tempfile.TemporaryDirectory(prefix="toque-test-") as folder:
        yield Path(folder)


@pytest.fixture(params=["local", "grpc"])
def address(request: pytest.FixtureRequest, run_folder: Path) -> str:
    return str(run_folder / "r.sock") if request.param == "local" else f"grpc+unix:{run_folder}/r.grpc"


@pytest.fixture
def start_replica(run_folder: Path) -> Iterator[Start]:
    """Starts ``toque.replica.fake`` with these options; whatever is left of it is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str, grpc: bool = False) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "toque.replica.fake", "--socket", str(run_folder / "r.sock")]
        argv += ["--parent-pid", str(os.getpid()), *options]
        if grpc:
            argv += ["--grpc", f"unix:{run_folder}/r.grpc"]
        process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def session(start_replica: Start, address: str) -> AsyncIterator[ReplicaSession]:
    start_replica(grpc=address.startswith("grpc"))
    session = ReplicaSession("r", address)
    session.start()
    await session.wait_ready(20)
    yield session
    await session.close()
