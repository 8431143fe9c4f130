"""From the start of a process to its first token: under 1.5 s for the default model, its file in the page cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAX_S = 1.5


def cpu_seconds(*arguments: str) -> float:
    """What the command and all its threads computed, from `wait4`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "toque", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.model
def test_the_first_token_comes_soon(smollm2: Path) -> None:
    """Computing time on one thread, the best of some: waiting for the machine's other work is no fault of ours."""
    command = ("run", str(smollm2), "Hello", "--max-tokens", "1", "--temperature", "0", "--threads", "1")
    smollm2.read_bytes()
    best = cpu_seconds(*command)
    for _ in range(4):
        if best < MAX_S:
            break
        best = min(best, cpu_seconds(*command))
    assert best < MAX_S
