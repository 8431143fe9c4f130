"""A replica process around the fake engine, over either carrier."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from replica.clients import Start
from toque.routing.session import ReplicaSession

settings.register_profile(
    "wire", deadline=None, derandomize=True, max_examples=60
)  # the machine may be busy with other tests
settings.load_profile("wire")


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
        process = subprocess.Popen(argv)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    """The folder of one replica, serving both carriers, for all of a module's tests that leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="toque-test-") as folder:
        argv = [sys.executable, "-m", "toque.replica.fake", "--parent-pid", str(os.getpid())]
        argv += ["--socket", f"{folder}/r.sock", "--grpc", f"unix:{folder}/r.grpc"]
        process = subprocess.Popen(argv)
        yield Path(folder)
        process.kill()
        process.wait()


@pytest.fixture(params=["local", "grpc"])
def shared_address(request: pytest.FixtureRequest, shared_folder: Path) -> str:
    return str(shared_folder / "r.sock") if request.param == "local" else f"grpc+unix:{shared_folder}/r.grpc"


@pytest.fixture
async def session(shared_address: str) -> AsyncIterator[ReplicaSession]:
    session = ReplicaSession("r", shared_address)
    session.start()
    await session.wait_ready(20)
    yield session
    await session.close()
