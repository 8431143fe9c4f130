"""A server of its own for a measurement: started on a free loopback port, stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toque.errors import ConfigError

_LEFT_OUT = ("TOQUE_API_KEY", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """``served`` is the name under which the server has its model."""

    url: str
    served: str
    key: str
    pid: int
    seconds_to_ready: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    *,
    ready: str,
    key: str = "",
    environment: Mapping[str, str] | None = None,
    name: str = "the server",
    timeout_s: float = 120.0,
) -> Iterator[LocalServer]:
    """Run ``command``, which must listen on ``port``, until the path ``ready`` answers; end it when the block ends.

    Raises ConfigError when the process ends or takes longer than ``timeout_s``; ``name`` is what messages call it.
    """
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        while True:
            if process.poll() is not None:
                raise ConfigError(f"{name} ended with exit code {process.returncode} before it was ready")
            with contextlib.suppress(OSError):  # not there yet, not ready yet, or slow to say so
                urllib.request.urlopen(
                    urllib.request.Request(url + ready, headers=headers), timeout=1
                ).close()
                break
            if time.monotonic() - began > timeout_s:
                raise ConfigError(f"{name} was not ready after {timeout_s:g} s")
            time.sleep(0.02)
        seconds = time.monotonic() - began
        asking = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(asking, timeout=10) as answer:
            served = json.load(answer)["data"][0]["id"]
        yield LocalServer(url, served, key, process.pid, seconds)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def toque_command(
    model: str, port: int, key: str, folder: str, *options: str
) -> tuple[list[str], dict[str, str]]:
    """`toque serve MODEL` and its environment: its ledger in ``folder``, none of this machine's keys but ``key``.

    Python may write bytecode, as an installation has it: without, each start compiles what was edited since.
    """
    command = [
        sys.executable,
        "-m",
        "toque",
        "serve",
        model,
        "--port",
        str(port),
        "--log-level",
        "warning",
        *options,
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)},
        "TOQUE_AUTH_API_KEYS": key,
        "TOQUE_LEDGER_FOLDER": folder,
        "TOQUE_LEDGER_URL": "",
    }
    return command, environment


@contextlib.contextmanager
def toque_server(model: str, *options: str) -> Iterator[LocalServer]:
    """A Toque of its own, with a key of its own."""
    port, key, name = free_port(), secrets.token_hex(16), f"the server for {model!r}"
    with tempfile.TemporaryDirectory(prefix="toque-bench-") as folder:
        command, environment = toque_command(model, port, key, folder, *options)
        with running(command, port, ready="/ready", key=key, environment=environment, name=name) as server:
            yield server
