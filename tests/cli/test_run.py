"""`toque run` on the scripted model: one question, piped input, a conversation at a terminal, Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.parrot import CHAT_TEMPLATE, make_parrot, script

TOQUE = [sys.executable, "-m", "toque"]
PIECES = [" a", b"\xe6\xad", b"\xaa", " b"]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parrot")
    return make_parrot(folder, script("\n", PIECES), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endless")
    transitions = {"\n": "x", "x": "y", "y": "x"}
    return make_parrot(folder, transitions, chat_template=CHAT_TEMPLATE, context_length=16384)


def run(*arguments: object, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    """With ``typed`` piped in; without, there is nothing to read."""
    stdin = {"stdin": subprocess.DEVNULL} if typed is None else {"input": typed}
    return subprocess.run(
        [*TOQUE, "run", *map(str, arguments), "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **stdin,  # type: ignore[call-overload]
    )


def test_a_question_is_answered_on_standard_output(parrot: Path) -> None:
    done = run(parrot, "hi", "--system", "be brief", "--max-tokens", 20, "--context-length", 256)
    assert (done.returncode, done.stdout, done.stderr) == (0, " a歪 b\n", "")
    assert run(parrot, "hi", "--max-tokens", 1).stdout == " a\n"


def test_a_question_may_be_piped_in(parrot: Path) -> None:
    assert run(parrot, typed="hi\n").stdout == " a歪 b\n"
    empty = run(parrot)
    assert empty.returncode == 2
    assert "empty" in empty.stderr


def test_what_cannot_be_asked_is_one_line(parrot: Path, tmp_path: Path) -> None:
    long = run(parrot, "hi " * 2000)
    assert long.returncode == 1
    assert "2048" in long.stderr
    plain = make_parrot(tmp_path / "plain", script("\n", PIECES))
    untaught = run(plain, "hi")
    assert untaught.returncode == 1
    assert "no chat template" in untaught.stderr
    for done in (long, untaught):
        assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_an_answer_with_what_was_said(endless: Path) -> None:
    process = subprocess.Popen(
        [*TOQUE, "run", str(endless), "hi", "--temperature", "0", "--max-tokens", "16000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == "xyxy"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"(xy)*x?\n", rest)
    assert errors == ""


class Terminal:
    """A person at `toque run`: reads what is on the screen, types."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*TOQUE, "run", *arguments, "--temperature", "0"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.screen = ""

    def read(self, pattern: str, seconds: float = 60.0) -> str:
        """Everything up to the pattern; what follows stays to be read."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.screen)
            if found:
                seen, self.screen = self.screen[: found.end()], self.screen[found.end() :]
                return seen
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.screen[-500:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.screen += os.read(self.master, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_conversation(parrot: Path) -> None:
    terminal = Terminal(str(parrot))
    try:
        terminal.read("Ctrl-D leaves.*> ".replace(".*", r"[\s\S]*"))
        for line in ("hi\n", "again\n"):
            terminal.type(line)
            assert " a歪 b" in terminal.read("\r\n> ")
        terminal.type("hi " * 1200 + "\n/clear\nhi\n")
        terminal.read("2048")  # too long; the conversation goes on
        terminal.read(" a歪 b\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_ctrl_c_ends_one_answer_of_a_conversation(endless: Path) -> None:
    terminal = Terminal(str(endless), "--max-tokens", "16000")
    try:
        terminal.read("> ")
        for _ in range(2):
            terminal.type("hi\n")
            terminal.read("xyxy")
            terminal.process.send_signal(signal.SIGINT)
            terminal.read("\r\n> ")
        for attempt in range(20):  # a signal before the read call is seen only after a line, or another one
            time.sleep(0.5)
            terminal.process.send_signal(signal.SIGINT)  # at the prompt it does nothing
            try:
                terminal.read("> ", 2.0)
                break
            except AssertionError:
                assert attempt < 19
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
