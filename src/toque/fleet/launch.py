"""How a replica process is started: its command line, its address, what it may live without."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from toque.fleet.placement.base import PARENT_PID, ReplicaSpec, loaded_mark
from toque.fleet.store import ReplicaRow, Revision

LEASE_S = 30.0

Command = Callable[[Revision], Sequence[str]]


def replica_command(model: Path, engine: Mapping[str, object]) -> list[str]:
    """The command line of a replica, without what differs from one process to the next.

    ``engine`` holds EngineOptions by field name; None leaves the replica's own default.
    """
    argv = [sys.executable, "-m", "toque.replica", "--model", str(model)]
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    return argv


def command_of(revision: Revision) -> list[str]:
    argv = [*replica_command(Path(revision.path), revision.engine), "--digest", revision.digest]
    return [*argv, "--state", revision.state] if revision.state else argv


class Launch(Struct, frozen=True):
    """``folder``: where sockets are made, a private one. ``bound``: replicas end with this process, however it ends;
    otherwise they live on until nobody has had a session with them for ``lease_s``."""

    folder: Path
    bound: bool = True
    lease_s: float = LEASE_S
    command: Command = command_of

    def address(self, epoch: int) -> str:
        return str(self.folder / f"r{epoch}")  # short: a socket's path may have 107 bytes

    def spec(self, row: ReplicaRow, revision: Revision, grace_s: float) -> ReplicaSpec:
        argv = [*self.command(revision), "--name", row.id, "--socket", row.address]
        argv += ["--loaded-mark", loaded_mark(row.address)]
        if self.bound:
            argv += ["--parent-pid", PARENT_PID]
        argv += ["--lease-s", f"{self.lease_s:g}", "--drain-s", f"{grace_s:g}"]
        return ReplicaSpec(
            row.id,
            row.epoch,
            argv,
            row.address,
            resources={"memory_mb": row.memory_mb},
            model_digest=revision.digest,
            lease_s=self.lease_s,
        )
