"""The real server as a person starts it: `toque serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from openai import OpenAI

TOQUE = [sys.executable, "-c", "from toque.cli.main import main; main()"]
START_S = 60.0


@dataclass
class Server:
    """A running `toque serve`. ``model`` is the first model's name."""

    process: subprocess.Popen[str]
    url: str
    model: str
    key: str
    log: Path
    home: Path

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=60)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(
            self.url + path, json={"model": self.model, **body}, headers=self.headers, timeout=60
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(float(value) for value in found)

    def noted(self) -> bool:
        """Whether the ledger's database has tokens of a request that is still open; they are noted each second."""
        query = "SELECT 1 FROM usage_event WHERE outcome = 'open' AND completion_tokens > 0"
        with contextlib.closing(sqlite3.connect(self.home / "ledger" / "ledger.db", timeout=60)) as database:
            try:
                return database.execute(query).fetchone() is not None
            except sqlite3.OperationalError:  # its tables are made once the server is ready
                return False

    def replicas(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "toque.replica" in " ".join(_command(child))]

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> float:
        started = time.perf_counter()
        while not condition():
            assert time.perf_counter() - started < seconds, (
                f"not in time; the server said:\n{self.log.read_text()}"
            )
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return time.perf_counter() - started

    def terminate(self, seconds: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def serving(
    model: Path,
    *flags: str,
    key: str = "",
    name: str = "m",
    backend: str = "reference",
    home: Path | None = None,
) -> Iterator[Server]:
    """`toque serve` until it is ready; it and its replicas are gone afterwards. Its TOQUE_HOME, too, unless given."""
    arguments = [f"{name}={model}", "--port", "0", "--backend", backend, *flags]
    arguments += ["--api-key", key] if key else []
    with serve(*arguments, key=key, name=name, home=home) as server:
        yield server


@contextlib.contextmanager
def serve(*arguments: str, key: str = "", name: str = "m", home: Path | None = None) -> Iterator[Server]:
    """As `serving`, with whatever arguments."""
    with tempfile.TemporaryDirectory(prefix="toque-e2e-") as folder:
        log = Path(folder) / "log"
        home = home or Path(folder) / "home"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*TOQUE, "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment(home),
            )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()  # the ready line, or nothing when it gave up
            found = re.search(r"at (http://\S+)/v1 ", first)
            assert found, f"it did not start: {first}{log.read_text()}"
            server = Server(process, found.group(1), name, key, log, home)
            yield server
        finally:
            replicas = Server(process, "", name, key, log, home).replicas() if process.poll() is None else []
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdout is not None
            process.stdout.close()
            _, alive = psutil.wait_procs(replicas, timeout=30)
            for orphan in alive:
                orphan.kill()
            assert not alive, "a replica outlived its server"


def environment(home: Path | None = None) -> dict[str, str]:
    """This process's environment without settings that would reach the server."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TOQUE_")}
    return plain if home is None else {**plain, "TOQUE_HOME": str(home)}


def run(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`toque ...` to its end, which must come soon."""
    return subprocess.run(
        [*TOQUE, *arguments],
        capture_output=True,
        text=True,
        env=environment(home),
        timeout=START_S,
        check=False,
    )
