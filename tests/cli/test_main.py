"""The command as a whole: its table of verbs, exit codes, and how soon it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import click
import pytest

from toque import __version__, _native
from toque.cli import main as cli
from toque.errors import ConfigError

TOQUE = [sys.executable, "-m", "toque"]


def toque(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOQUE_")}
    return subprocess.run(
        [*TOQUE, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env={**environment, "TOQUE_HOME": str(home)},
        check=False,
    )


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    return left.value.code


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, attribute, text = cli.VERBS[verb]
    assert isinstance(getattr(import_module(module), attribute), click.Command)
    assert text.endswith(".")
    assert exit_code(verb, "--help") == 0
    assert f"Usage: toque {verb}" in capsys.readouterr().out


def test_every_file_of_a_verb_is_in_the_table() -> None:
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    named = {module.rsplit(".", 1)[1] for module, _, _ in cli.VERBS.values()}
    others = {"__init__", "main", "progress_bar", "admin_api", "bench_compare", "proposals", "statement"}
    assert files - named == others


def test_help_comes_in_a_fifth_of_a_second_of_work() -> None:
    """CPU time, the best of some: the machine that runs the tests has other work."""
    code = (
        "import sys, time; from toque.cli import main\n"
        "try: main.main(['--help'])\n"
        "finally: print(time.process_time(), 'click' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    for _ in range(10):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        seconds, *imported = run.stderr.split()
        assert imported == ["False", "False"]
        assert all(verb in run.stdout for verb in cli.VERBS)
        if float(seconds) < 0.2:
            return
    pytest.fail(f"{seconds} s each time")


def test_wrong_use_is_exit_code_2_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["frobnicate"], ["frobnicate", "toque --help"]),
        (["list", "--frob"], ["--frob", "toque list --help"]),
        (["run"], ["MODEL", "toque run --help"]),
        (["run", "m", "hi", "--max-tokens", "0"], ["--max-tokens", "0"]),
        (["bench", "--workload", "none"], ["none", "sequential"]),
    ):
        assert exit_code(*arguments) == 2
        shown = capsys.readouterr().err
        assert all(word in shown for word in words), shown
        assert len(shown.splitlines()) <= 6
    assert exit_code() == 2
    assert "serve" in capsys.readouterr().out


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    damaged, text = tmp_path / "cut.gguf", tmp_path / "notes.gguf"
    damaged.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    text.write_text("hello")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, word in (
        (["run", str(damaged), "hi"], "header.tensor_count"),
        (["run", str(text), "hi"], "not a GGUF file"),
        (["run", str(empty), "hi"], "config.json"),
        (["run", "./no/such.gguf", "hi"], "no file or folder './no/such.gguf'"),
        (["run", "no-such-model", "hi"], "catalog"),
        (["run", str(damaged), "hi", "--threads", "1000000"], "1000000"),
        (["show", "no-such-model"], "no-such-model"),
        (["rm", "../../etc"], "../../etc"),
        (["pull", "ftp:x"], "ftp"),
        (["bench", "m", "--url", "ftp://x"], "ftp://x"),
    ):
        done = toque(*arguments, home=tmp_path / "home")
        assert done.returncode == 1, (arguments, done)
        assert word in done.stderr
        assert done.stderr.startswith("toque: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert not done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("version", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == __version__
    assert facts["isas"] == list(_native.isas())
    assert exit_code("--version") == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt, click.Abort])
def test_ctrl_c_is_exit_code_130(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr("toque.cli.version.command", command)
    assert exit_code("version") == 130


def test_an_error_of_ours_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> None:
        raise ConfigError("the moon is full")

    monkeypatch.setattr("toque.cli.version.command", command)
    assert exit_code("version") == 1
    assert capsys.readouterr().err == "toque: the moon is full\n"


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen([*TOQUE, "list", "--catalog"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors


def test_ctrl_c_while_starting_leaves_no_traceback(tmp_path: Path) -> None:
    for delay in (0.02, 0.1, 0.3):
        process = subprocess.Popen(
            [*TOQUE, "list"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TOQUE_HOME": str(tmp_path)},
            text=True,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "toque/cli" not in errors, errors
