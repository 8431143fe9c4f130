"""A pull's progress as a terminal shows it."""

from __future__ import annotations

import pytest

from toque.cli.progress_bar import progress_bar
from toque.registry.progress import Progress


def test_a_bar_for_each_file_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(enabled=True) as report:
        report(Progress("download", "m.gguf", 0, 2_000_000))
        report(Progress("download", "m.gguf", 2_000_000, 2_000_000))
        report(Progress("verify", "m.gguf", 2_000_000, 2_000_000))
    shown = capsys.readouterr()
    assert "downloading m.gguf" in shown.err
    assert "checking m.gguf" in shown.err
    assert "2.0/2.0 MB" in shown.err
    assert not shown.out


def test_nothing_is_drawn_where_nothing_is_pulled_or_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(enabled=True):
        pass
    with progress_bar(enabled=False) as report:
        report(Progress("download", "m.gguf", 1, 2))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_a_pull_that_fails_leaves_the_terminal_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def pull() -> None:
        with progress_bar(enabled=True) as report:
            report(Progress("download", "m.gguf", 1, None))
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        pull()
    assert "m.gguf" in capsys.readouterr().err
