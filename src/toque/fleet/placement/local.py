"""Replicas as subprocesses of this process: the default, and all a laptop needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable

from toque.engine.memory import available_bytes, total_bytes
from toque.errors import EngineError
from toque.fleet.placement.base import (
    PARENT_PID,
    Event,
    EventKind,
    Node,
    Observed,
    ReplicaSpec,
    loaded_mark,
)
from toque.fleet.placement.events import Events

_TAIL_LINES = 40
_MAX_LINE = 4096
# Prefixes of variables that a replica has no business with: keys, and the address of a database with its password.
_SECRETS = ("TOQUE_API_KEY", "TOQUE_AUTH_", "TOQUE_LEDGER_", "TOQUE_REGISTRY_")

Log = Callable[[str, str], None]  # replica id and a line


def log_to_stderr(replica_id: str, line: str) -> None:
    """As this process logs, or as it is where it has no log."""
    logger = logging.getLogger("toque.replica")
    if logger.hasHandlers():
        level = logging.ERROR if line.startswith("error:") else logging.INFO
        logger.log(level, "[%s] %s", replica_id, line, extra={"fields": {"replica": replica_id}})
    else:
        print(f"[{replica_id}] {line}", file=sys.stderr, flush=True)


class LocalPlacement:
    """Each replica leads a session and a process group of its own, so that a terminal's Ctrl-C is ours to handle and
    `stop` ends everything it may have started. What it prints goes to ``log``, line by line.

    A replica given PARENT_PID is killed by the kernel when this process ends, however that happens; on Linux already
    when the thread ends that called `ensure`, so call it from one that lives as long as the replicas shall.
    """

    def __init__(self, log: Log = log_to_stderr) -> None:
        self._log = log
        self._processes: dict[str, _Process] = {}
        self._events = Events()

    async def capacity(self) -> list[Node]:
        return [this_machine()]

    async def ensure(self, spec: ReplicaSpec) -> None:
        present = self._processes.get(spec.replica_id)
        if present is not None:
            if present.spec.epoch == spec.epoch:
                return
            if present.spec.epoch > spec.epoch:
                raise EngineError(
                    f"replica {spec.replica_id} is at epoch {present.spec.epoch}, not {spec.epoch}"
                )
            await self.stop(spec.replica_id, present.spec.epoch, 0.0)
        self._processes[spec.replica_id] = process = _Process(spec, self._log)
        await process.start(lambda: self._tell(spec, EventKind.EXITED))
        self._tell(spec, EventKind.STARTED)

    async def stop(self, replica_id: str, epoch: int, grace_s: float) -> int | None:
        process = self._processes.get(replica_id)
        if process is None or process.spec.epoch != epoch:
            return None
        status = await process.stop(grace_s)
        if self._processes.get(replica_id) is process:
            del self._processes[replica_id]
        return status

    async def close(self, grace_s: float) -> None:
        """Stops every replica, all at once."""
        every = [process.spec for process in self._processes.values()]
        await asyncio.gather(*(self.stop(spec.replica_id, spec.epoch, grace_s) for spec in every))

    async def list(self) -> list[Observed]:
        return [process.observed() for process in self._processes.values()]

    def watch(self) -> AsyncGenerator[Event, None]:
        return self._events.watch()

    def _tell(self, spec: ReplicaSpec, kind: EventKind) -> None:
        self._events.tell(spec.replica_id, spec.epoch, kind)


class _Process:
    def __init__(self, spec: ReplicaSpec, log: Log) -> None:
        self.spec = spec
        self._log = log
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[None] | None = None
        self._status: int | None = None

    async def start(self, on_exit: Callable[[], None]) -> None:
        argv = [str(os.getpid()) if arg == PARENT_PID else arg for arg in self.spec.argv]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment(self.spec),
                start_new_session=True,
            )
        except OSError as error:
            self._status = 127
            self._tail.append(f"error: cannot start {argv[0]}: {error.strerror}")
            on_exit()
            return
        self._end = asyncio.get_running_loop().create_task(self._attend(self._process, on_exit))

    async def stop(self, grace_s: float) -> int | None:
        if self._process is not None and self._end is not None:
            if self._status is None and grace_s > 0:
                self._signal(signal.SIGTERM)
                await asyncio.wait([self._end], timeout=grace_s)
            if self._status is None:
                self._signal(signal.SIGKILL)
            await asyncio.wait([self._end])
        for path in (self.spec.address, loaded_mark(self.spec.address)):
            with contextlib.suppress(OSError):
                os.unlink(path)
        return self._status

    def observed(self) -> Observed:
        return Observed(
            self.spec.replica_id,
            self.spec.epoch,
            self.spec.address,
            handle=str(self._process.pid) if self._process is not None else "",
            exit_status=self._status,
            last_error=last_error(list(self._tail), self._status) if self._status is not None else "",
            loaded=os.path.exists(loaded_mark(self.spec.address)),
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _attend(self, process: asyncio.subprocess.Process, on_exit: Callable[[], None]) -> None:
        output = asyncio.get_running_loop().create_task(self._read(process))
        status = await process.wait()
        self._signal(signal.SIGKILL)  # what it may have left behind in its group
        self._status = status
        # What it said last has been written by now; a grandchild that holds the pipe open must not hold us up.
        await asyncio.wait([output], timeout=0.2)
        output.cancel()
        on_exit()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(line)
        if rest:
            self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode(errors="replace").rstrip()
        if text:
            self._tail.append(text)
            self._log(self.spec.replica_id, text)


def this_machine() -> Node:
    """What replicas that are started here may use: a control group's limit, where there is one below the machine's."""
    import psutil

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    available, total = available_bytes(), total_bytes()
    return Node(
        "local",
        float(cpus),
        memory.available if available is None else available,
        memory.total if total is None else total,
    )


def environment(spec: ReplicaSpec) -> dict[str, str]:
    """This process's own, without its secrets, and what the specification adds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    return {**inherited, **spec.environment}


def last_error(tail: list[str], status: int | None) -> str:
    """What a person is told of a process that ended: its own last error if it named one, and how it ended."""
    if status == 0:
        return ""
    if status is not None and status < 0:
        try:
            how = f"killed by {signal.Signals(-status).name}"
        except ValueError:
            how = f"killed by signal {-status}"
    else:
        how = f"exit status {status}"
    for line in reversed(tail):
        if line.startswith("error: "):
            return f"{line.removeprefix('error: ')} ({how})"
    return how
