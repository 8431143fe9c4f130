"""Where this process's replicas listen: a private folder that does not outlive it for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from toque.errors import ConfigError

_LOCK = "lock"
_LIVE = "run-"


class RunFolder:
    """A fresh folder, 0700 like the one it is in: ``$XDG_RUNTIME_DIR/toque-UID`` or the same among temporary files.

    It is locked while this process lives. What processes that were killed left behind is removed when the next one
    makes its own; a lock rather than a process id tells, because containers may share the folder.
    """

    def __init__(self, base: Path | None = None) -> None:
        """Raises ConfigError when the folder around it belongs to somebody else or is open to others."""
        base = private_base() if base is None else _make_private(base)
        _sweep(base)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        self._lock = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = fresh.rename(base / fresh.name.replace("new-", _LIVE, 1))  # from here on it may be swept

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def private_base() -> Path:
    """The folder around all of them, made if need be. ConfigError as above."""
    return _make_private(
        Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"toque-{os.geteuid()}"
    )


def _make_private(base: Path) -> Path:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {base} for sockets: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the folder {base} must be this user's alone (mode 0700): remove it, or set XDG_RUNTIME_DIR"
        )
    return base


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{_LIVE}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
