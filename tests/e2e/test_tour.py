"""The README's two-minute tour, command by command as it is written there, against a real server and a real model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from toque.registry.store import Store

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TITLE = "## A two-minute tour"
AFTER = re.compile(r"(\d+) answered, (\d+) failed")


def blocks() -> list[list[str]]:
    """The commands of each bash block of the tour; a comment at a line's end is for people."""
    section = README[README.index(TITLE) :]
    section = section[: section.index("\n## ", 1)]
    found = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [
        [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()] for text in found
    ]


@dataclass
class Terminal:
    """A folder with `toque` and `python` in its path, a store of its own and a free port."""

    folder: Path
    port: int

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "TOQUE_HOME": str(self.folder / "home"),
            "TOQUE_SERVER_PORT": str(self.port),
            "TOQUE_URL": f"http://127.0.0.1:{self.port}",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def background(self, command: str) -> Iterator[subprocess.Popen[str]]:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {command}"],
                cwd=self.folder,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    try:
                        process.communicate(timeout=60)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.communicate()


@pytest.fixture
def terminal(smollm2: Path, tmp_path: Path) -> Terminal:
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("toque", " -m toque")):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
        shim.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    Store(tmp_path / "home").pull(f"file:{smollm2}", name="smollm2")  # `toque pull` finds it there
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Terminal(tmp_path, probe.getsockname()[1])


def answered(line: str) -> tuple[int, int]:
    """How many of the traffic's requests were answered, and how many failed."""
    found = AFTER.search(line)
    assert found is not None, line
    return int(found[1]), int(found[2])


@pytest.mark.model
@pytest.mark.slow
def test_the_tour_goes_as_the_readme_says(terminal: Terminal) -> None:
    start, traffic, rollout, kill, sleep, wake = blocks()
    *before, serve = start
    for command in before:
        terminal.run(command)
    with terminal.background(serve) as server:
        assert server.stdout is not None
        assert "Toque serves chat" in server.stdout.readline()
        with terminal.background(*traffic) as clients:
            assert clients.stdout is not None
            while answered(clients.stdout.readline()) < (3, 0):
                pass
            said = "".join(terminal.run(command) for command in rollout)
            assert "chat: done, helper/1 to helper/2" in said
            dead = terminal.run("toque ps -q chat")
            for command in kill:
                terminal.run(command)
            end = time.monotonic() + 30
            while not (alive := terminal.run("toque ps -q chat")) or alive == dead:
                assert time.monotonic() < end
            count = answered(clients.stdout.readline())[0]
            while answered(clients.stdout.readline())[0] < count + 8:  # it goes on in the successor
                pass
            clients.send_signal(signal.SIGINT)
            output = clients.communicate(timeout=60)[0]
            assert clients.returncode == 0, (output, (terminal.folder / "log").read_text())
            total = output.splitlines()[-1]
            assert answered(total)[1] == 0
            assert total.partition("by version: ")[2].count(",") == 1  # both versions answered
        said = "".join(terminal.run(command) for command in sleep)
        assert "chat: asleep" in said
        assert not terminal.run("toque ps -q chat")
        said = "".join(terminal.run(command) for command in wake)
        assert answered(said.splitlines()[-1])[1] == 0
        assert answered(said.splitlines()[-1])[0] > 0
