"""A PostgreSQL server of one's own, from Debian's package: a Unix socket in a temporary folder, nothing else."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote


def binaries() -> Path | None:
    """The newest installation's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if found:
        return found[-1]
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, Any]

    def database(self, name: str) -> str:
        """A new database's URL."""
        subprocess.run(
            [binaries() / "createdb", "-h", self.folder, "-U", "toque", name], check=True, **self.environment
        )  # type: ignore[operator]
        return f"postgresql://toque@/{name}?host={quote(str(self.folder))}"

    def pids(self) -> list[int]:
        """The server and its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    programs = binaries()
    assert programs is not None
    environment: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        environment |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = folder / "data"
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "toque", "-A", "trust", "-E", "UTF8", "--no-sync"],
        check=True, **environment,
    )  # fmt: skip
    process = subprocess.Popen(
        [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off",
         "-c", "shared_buffers=16MB", "-c", "max_connections=20", "-c", "autovacuum=off"],
        stderr=subprocess.DEVNULL, **environment,
    )  # fmt: skip
    try:
        until = time.monotonic() + 30
        while subprocess.run([programs / "pg_isready", "-q", "-h", folder], check=False).returncode:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server did not come up"
            time.sleep(0.05)
        yield Server(process, folder, environment)
    finally:
        process.send_signal(signal.SIGINT)  # does not wait for clients
        process.wait(30)
