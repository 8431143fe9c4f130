"""The folder of sockets: private, locked while its process lives, swept after that."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from toque.errors import ConfigError
from toque.fleet.run_folder import RunFolder


def test_it_is_private_and_goes_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "base")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    folder.close()
    assert list((tmp_path / "base").iterdir()) == []


def test_a_live_one_is_left_alone_and_a_dead_one_is_swept(tmp_path: Path) -> None:
    base = tmp_path / "base"
    live = RunFolder(base)
    code = "import os, sys; from pathlib import Path; from toque.fleet.run_folder import RunFolder\n"
    code += "print(RunFolder(Path(sys.argv[1])).path, flush=True); os._exit(9)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(base)], capture_output=True, text=True, check=False
    )
    dead = Path(done.stdout.strip())
    assert dead.is_dir()
    other = RunFolder(base)
    assert not dead.exists()
    assert live.path.is_dir()
    assert other.path != live.path
    live.close()
    other.close()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        RunFolder(tmp_path / "base")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "base").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError):
        RunFolder(tmp_path / "base")
