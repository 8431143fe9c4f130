"""Replicas on this machine that outlive the process that started them, for a fleet that is kept in a database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from toque.errors import EngineError
from toque.fleet.placement.base import Event, EventKind, Node, Observed, ReplicaSpec, loaded_mark
from toque.fleet.placement.events import Events
from toque.fleet.placement.local import Log, environment, last_error, log_to_stderr, this_machine

UNKNOWN_STATUS = 255  # of a process that was not ours to wait for
_TAIL_BYTES = 16_384
_TAIL_LINES = 40
_POLL_S = 0.05  # where the kernel does not tell of an end


class Record(Struct, frozen=True):
    """What the folder knows of a process: enough to tell it from another that has its id by now."""

    replica_id: str
    epoch: int
    address: str
    pid: int
    created: float  # seconds since the epoch, as the kernel counted
    started_by: int
    model_digest: str = ""


@dataclass(slots=True, eq=False)
class _Process:
    record: Record
    own: bool  # a child of this process
    status: int | None = None
    error: str = ""
    watched: int | None = None  # a descriptor that is readable once it has ended
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class DetachedPlacement:
    """Each process has a record and a log in ``folder``, named by replica id and epoch. Whoever opens the folder next
    lists what runs, and may stop it; nothing that runs is disturbed by `close` or by this process's end.

    A replica that nobody has a session with for its lease ends by itself, so nothing stays for ever either. What it
    prints is in its log; the last of it is passed on to ``log`` when it ends badly.
    """

    def __init__(self, folder: Path, log: Log = log_to_stderr) -> None:
        """The folder is made if need be, private; it must be short, because sockets are in it too."""
        self.folder = folder
        self._log = log
        self._events = Events()
        self._processes: dict[tuple[str, int], _Process] = {}

    async def capacity(self) -> list[Node]:
        return [this_machine()]

    async def ensure(self, spec: ReplicaSpec) -> None:
        self._look()
        key = (spec.replica_id, spec.epoch)
        others = [epoch for replica_id, epoch in self._processes if replica_id == spec.replica_id]
        if any(epoch > spec.epoch for epoch in others):
            raise EngineError(f"replica {spec.replica_id} is at epoch {max(others)}, not {spec.epoch}")
        if key in self._processes:
            return
        for epoch in others:
            await self.stop(spec.replica_id, epoch, 0.0)
        self._processes[key] = self._start(spec)
        self._events.tell(spec.replica_id, spec.epoch, EventKind.STARTED)

    async def stop(self, replica_id: str, epoch: int, grace_s: float) -> int | None:
        self._look()
        process = self._processes.get((replica_id, epoch))
        if process is None:
            return None
        if process.status is None and grace_s > 0:
            self._signal(process, signal.SIGTERM)
            await self._end(process, grace_s)
        while process.status is None:
            self._signal(process, signal.SIGKILL)
            await self._end(process, 1.0)
        for path in (
            self._path(process.record),
            self._log_path(process.record),
            Path(process.record.address),
            Path(loaded_mark(process.record.address)),
        ):
            path.unlink(missing_ok=True)
        self._unwatch(process)
        self._processes.pop((replica_id, epoch), None)
        return process.status

    async def list(self) -> list[Observed]:
        self._look()
        return [_observed(process) for process in self._processes.values()]

    def watch(self) -> AsyncGenerator[Event, None]:
        return self._events.watch()

    async def close(self) -> None:
        """Lets go of the processes; they go on."""
        for process in self._processes.values():
            self._unwatch(process)
        self._processes.clear()
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # where nothing is in it

    def _start(self, spec: ReplicaSpec) -> _Process:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = Record(spec.replica_id, spec.epoch, spec.address, 0, 0.0, os.getpid(), spec.model_digest)
        log = os.open(self._log_path(record), os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A session and a group of its own: no terminal's Ctrl-C reaches it, and a signal to the group is its.
            pid = os.posix_spawnp(
                spec.argv[0],
                list(spec.argv),
                environment(spec),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            why = f"cannot start {spec.argv[0]}: {error.strerror} (exit status 127)"
            self._events.tell(spec.replica_id, spec.epoch, EventKind.EXITED)
            return _Process(record, own=True, status=127, error=why)
        finally:
            os.close(log)
        created = _created(pid) or time.time()
        process = _Process(msgspec.structs.replace(record, pid=pid, created=created), own=True)
        path = self._path(process.record)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(process.record))
        fresh.rename(path)
        self._watch(process)
        return process

    def _look(self) -> None:
        """Takes up what others have started, forgets what others have stopped, and sees who has ended."""
        paths = {path.name: path for path in self.folder.glob("*.json")}
        for process in list(self._processes.values()):
            self._check(process)
            known = paths.pop(self._path(process.record).name, None)
            if known is None and not process.own:
                self._unwatch(process)
                del self._processes[process.record.replica_id, process.record.epoch]
        for path in paths.values():
            try:
                record = msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.DecodeError):
                continue  # it is being removed, or was never one
            process = _Process(record, own=False)
            self._processes[record.replica_id, record.epoch] = process
            self._watch(process)
            self._check(process)

    def _check(self, process: _Process) -> None:
        """Whether it has ended meanwhile."""
        if process.status is not None:
            return
        record = process.record
        if process.own:
            try:
                pid, status = os.waitpid(record.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else in this process waited for it
                pid, status = record.pid, UNKNOWN_STATUS << 8
            if not pid:
                return
            process.status = os.waitstatus_to_exitcode(status)
        else:
            created = _created(record.pid)
            if created is not None and abs(created - record.created) < 1.0:
                return
            process.status = UNKNOWN_STATUS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.own:
                os.killpg(record.pid, signal.SIGKILL)  # what it may have left behind in its group
        tail = _tail(self._log_path(record))
        process.error = last_error(tail, process.status)
        if not process.own and process.error == f"exit status {UNKNOWN_STATUS}":
            process.error = "it ended, nobody knows how"
        if process.error:
            for line in tail:
                self._log(record.replica_id, line)
        self._unwatch(process)
        process.ended.set()
        self._events.tell(record.replica_id, record.epoch, EventKind.EXITED)

    async def _end(self, process: _Process, within_s: float) -> None:
        """Returns when it has ended, or when the time is over."""
        until = time.monotonic() + within_s
        while process.status is None and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if process.watched is not None else min(left, _POLL_S)):
                    await process.ended.wait()
            self._check(process)

    def _watch(self, process: _Process) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.record.pid)
        except OSError:
            return
        process.watched = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._check, process)

    def _unwatch(self, process: _Process) -> None:
        if process.watched is not None:
            asyncio.get_running_loop().remove_reader(process.watched)
            os.close(process.watched)
            process.watched = None

    def _signal(self, process: _Process, number: signal.Signals) -> None:
        self._check(process)
        if process.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.record.pid, number)

    def _path(self, record: Record) -> Path:
        return self.folder / f"{record.replica_id}.{record.epoch}.json"

    def _log_path(self, record: Record) -> Path:
        return self.folder / f"{record.replica_id}.{record.epoch}.log"


def _observed(process: _Process) -> Observed:
    record = process.record
    return Observed(
        record.replica_id,
        record.epoch,
        record.address,
        str(record.pid) if record.pid else "",
        process.status,
        process.error,
        os.path.exists(loaded_mark(record.address)),
    )


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def _created(pid: int) -> float | None:
    """When the process of this id began, or None if there is none that lives."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None
