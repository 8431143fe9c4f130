"""The replica process: listen at once, load in a thread of its own, step there, serve from the main thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from toque.errors import ConfigError, ToqueError
from toque.proto import replica_pb2 as pb
from toque.replica.local import LocalServer, listen
from toque.replica.loop import StepLoop
from toque.replica.parent import bind_to_parent, parent_gone
from toque.replica.replica import Replica
from toque.replica.requests import Engine, RequestTable

EXIT_FAILED = 1  # worth another try
EXIT_REFUSED = 2  # the model or a setting is wrong: another try ends the same way
_TICK_S = 0.5
_PATIENCE_S = 5.0  # how long past its grace a step may hold up the exit


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """``lease_s``: exit when nobody has had a session for so long (0: never). ``grpc``: also serve there.
    ``loaded_mark``: a file to make once the engine is loaded, before it takes requests."""

    name: str
    socket: Path
    grpc: str = ""
    parent_pid: int = 0
    lease_s: float = 0.0
    drain_s: float = 30.0
    stall_s: float = 3.0
    max_requests: int = 4096
    loaded_mark: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """``at_rest``: what is left to do once the engine has nothing else to do."""

    engine: Engine
    model: pb.Model
    max_sequences: int
    at_rest: Callable[[], object] | None = None


def run(options: ReplicaOptions, load: Callable[[], Loaded]) -> int:
    """Serves until drained, and returns the process's exit status.

    The last line on stderr of a process that failed is ``error: …``, for whoever started it.
    """
    parent_fd = bind_to_parent(options.parent_pid) if options.parent_pid else None
    replica = Replica(options.name, stall_s=options.stall_s)
    try:
        local = LocalServer(replica, listen(options.socket))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    engine = _EngineThread(options, replica, load, local.wake)
    grpc_server = None
    try:
        if parent_fd is not None:
            local.watch(parent_fd, lambda: os._exit(EXIT_FAILED))
        signals = _Signals(replica, local, options.drain_s)
        engine.start()
        if options.grpc:
            from toque.replica.grpc import GrpcServer

            grpc_server = GrpcServer(replica, options.grpc)
        _serve(options, replica, local, engine, signals)
    except ConfigError as error:
        engine.refuse(error)
    finally:
        local.close()
        options.socket.unlink(missing_ok=True)
        if grpc_server is not None:
            grpc_server.close()
    if engine.ident is not None and not engine.finished:
        _exit_now(engine)  # it is stuck in a step
    if engine.error:
        print(f"error: {engine.error}", file=sys.stderr, flush=True)
    return engine.status


def _serve(
    options: ReplicaOptions, replica: Replica, local: LocalServer, engine: _EngineThread, signals: _Signals
) -> None:
    give_up: float | None = None
    while not engine.finished:
        local.serve_once(_TICK_S)
        signals.act()
        now = time.monotonic()
        replica.tick(now)
        if options.parent_pid and parent_gone(options.parent_pid):
            os._exit(EXIT_FAILED)
        if options.lease_s and not replica.n_sessions and now - replica.lonely_since > options.lease_s:
            replica.drain(0.0, f"nobody has had a session for {options.lease_s:g} s")
        if replica.draining_s is not None:
            limit = now + replica.draining_s + _PATIENCE_S
            give_up = limit if give_up is None else min(give_up, limit)
            if now > give_up:
                print("error: a step did not end in time to drain", file=sys.stderr, flush=True)
                return


class _Signals:
    """The first SIGTERM or SIGINT drains; a later SIGINT ends what is left. A later SIGTERM changes nothing: who takes
    over from a controller in the middle of a stop asks again, and whoever is in a hurry has SIGKILL.

    The handler only notes the signal: it may interrupt this thread while it holds a lock that draining needs.
    """

    def __init__(self, replica: Replica, local: LocalServer, grace_s: float) -> None:
        self._replica = replica
        self._grace_s = grace_s
        self._noted: list[int] = []
        signal.set_wakeup_fd(local.wake_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def act(self) -> None:
        while self._noted:
            number = signal.Signals(self._noted.pop(0))
            again = self._replica.draining_s is not None
            if not again or number == signal.SIGINT:
                self._replica.drain(0.0 if again else self._grace_s, f"asked to by {number.name}")

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted.append(signum)


def _exit_now(engine: _EngineThread) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(engine.status or EXIT_FAILED)


class _EngineThread(threading.Thread):
    """Loads the engine, runs its step loop, closes it. Nothing else ever touches the engine."""

    def __init__(
        self, options: ReplicaOptions, replica: Replica, load: Callable[[], Loaded], wake: Callable[[], None]
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.finished = False
        self.status = 0
        self.error = ""
        self._options = options
        self._replica = replica
        self._load = load
        self._wake = wake

    def refuse(self, error: ToqueError) -> None:
        self.status, self.error = EXIT_REFUSED, error.message

    def run(self) -> None:
        try:
            self._live()
        except ToqueError as error:
            self._fail(error, EXIT_FAILED if error.status >= 500 else EXIT_REFUSED, error.message)
        except MemoryError:
            self._fail(None, EXIT_FAILED, "out of memory")
        except Exception as error:
            traceback.print_exception(error)
            self._fail(error, EXIT_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self.finished = True
            self._wake()

    def _live(self) -> None:
        started = time.perf_counter()
        loaded = self._load()
        try:
            table = RequestTable(loaded.engine, max_requests=self._options.max_requests)
            loop = StepLoop(
                loaded.engine,
                table,
                self._replica.progress,
                self._replica.publish,
                at_rest=loaded.at_rest,
            )
            if self._options.loaded_mark is not None:
                with suppress(OSError):  # its folder may be gone, with whoever would have looked
                    self._options.loaded_mark.touch()
            self._replica.ready(loop, loaded.model, loaded.max_sequences)
            print(f"ready after {time.perf_counter() - started:.2f} s", file=sys.stderr, flush=True)
            loop.run()
        finally:
            loaded.engine.close()

    def _fail(self, error: Exception | None, status: int, message: str) -> None:
        self.status, self.error = status, " ".join(message.split())[:2000]
        self._replica.died(self.error)
