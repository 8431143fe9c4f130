"""A placement that only pretends, in virtual time: what the controller and its policies are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from toque.errors import EngineError
from toque.fleet.health import Health
from toque.fleet.placement.base import Event, EventKind, Node, Observed, ReplicaSpec
from toque.fleet.placement.events import Events
from toque.routing.base import ReplicaEntry, ReplicaState
from toque.types import EngineStats


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a process that is started will do. ``refuse``: it ends with this after loading, with ``status``;
    ``drain_s``: what it takes to finish when it is stopped, within the grace."""

    load_s: float = 0.0
    refuse: str = ""
    status: int = 2
    drain_s: float = 0.0


@dataclass(slots=True)
class FakeProcess:
    spec: ReplicaSpec
    behaviour: Behaviour
    started_at: float
    exit_status: int | None = None
    last_error: str = ""
    silent_since: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    gone_at: float | None = None  # it has been told to stop
    finished_at: float | None = None  # if it is given the time
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class FakePlacement:
    """Processes are entries of `processes`, by replica id. Time is ``now``, and passes only in `pass_time`.

    It is the HealthSource too. ``started`` and ``stopped`` remember every (replica id, epoch) in order; ``most`` is
    the largest number of processes that there ever were at once.
    """

    def __init__(
        self,
        behaviour: Callable[[ReplicaSpec], Behaviour] = lambda spec: Behaviour(),
        *,
        memory_mb: int = 1 << 20,
        now: float = 1_000_000.0,
    ) -> None:
        self.behaviour = behaviour
        self.memory_mb = memory_mb
        self.now = now
        self.processes: dict[str, FakeProcess] = {}
        self.started: list[tuple[str, int]] = []
        self.stopped: list[tuple[str, int]] = []
        self.most = 0
        self._events = Events()

    def clock(self) -> float:
        return self.now

    # Placement

    async def capacity(self) -> list[Node]:
        return [Node("fake", 64.0, self.memory_mb << 20, total_bytes=self.memory_mb << 20)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        present = self.processes.get(spec.replica_id)
        if present is not None:
            if present.spec.epoch == spec.epoch:
                return
            if present.spec.epoch > spec.epoch:
                raise EngineError(
                    f"replica {spec.replica_id} is at epoch {present.spec.epoch}, not {spec.epoch}"
                )
            self._remove(present)
        self.processes[spec.replica_id] = FakeProcess(spec, self.behaviour(spec), self.now)
        self.started.append((spec.replica_id, spec.epoch))
        self.most = max(self.most, sum(p.exit_status is None for p in self.processes.values()))
        self._settle()
        self._tell(spec, EventKind.STARTED)

    async def stop(self, replica_id: str, epoch: int, grace_s: float) -> int | None:
        process = self.processes.get(replica_id)
        if process is None or process.spec.epoch != epoch:
            return None
        if process.gone_at is None:
            self.stopped.append((replica_id, epoch))
            process.gone_at = process.finished_at = self.now + process.behaviour.drain_s
        process.gone_at = min(process.gone_at, self.now + grace_s)
        self._settle()
        await process.gone.wait()
        self._remove(process)
        return process.exit_status

    async def list(self) -> list[Observed]:
        return [
            Observed(
                process.spec.replica_id,
                process.spec.epoch,
                process.spec.address,
                f"fake-{process.spec.replica_id}.{process.spec.epoch}",
                process.exit_status,
                process.last_error,
            )
            for process in self.processes.values()
        ]

    def watch(self) -> AsyncGenerator[Event, None]:
        return self._events.watch()

    async def close(self) -> None:
        for process in list(self.processes.values()):
            self._remove(process)

    # HealthSource

    def follow(self, entries: Iterable[ReplicaEntry]) -> None:
        pass

    def health(self, replica_id: str, epoch: int) -> Health | None:
        process = self.processes.get(replica_id)
        if process is None or process.spec.epoch != epoch:
            return None
        if process.exit_status is not None:
            return Health(ReplicaState.DEAD, reason=process.last_error)
        if process.gone_at is not None:
            return Health(ReplicaState.DRAINING)
        if self.now < process.started_at + process.behaviour.load_s or process.behaviour.refuse:
            return Health(ReplicaState.STARTING, reason="loading the model")
        silent = 0.0 if process.silent_since is None else self.now - process.silent_since
        return Health(
            ReplicaState.DEGRADED if silent > 2.0 else ReplicaState.READY, silent, "", process.stats
        )

    # What happens to processes

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._settle()
        for _ in range(5):  # whoever waits for it goes on
            await asyncio.sleep(0)

    def kill(self, replica_id: str, status: int = -9) -> None:
        process = self.processes[replica_id]
        process.exit_status, process.last_error = status, f"ended with {status}"
        if process.gone_at is not None:  # whoever told it to stop waits for no more than its end
            process.gone_at = self.now
            self._settle()
        self._tell(process.spec, EventKind.EXITED)

    def silence(self, replica_id: str) -> None:
        """As SIGSTOP does."""
        self.processes[replica_id].silent_since = self.now

    def _settle(self) -> None:
        for process in list(self.processes.values()):
            if process.gone_at is not None and process.gone_at <= self.now:
                if process.exit_status is None:
                    process.exit_status = 0 if process.gone_at == process.finished_at else -9
                process.gone.set()
            elif (
                process.behaviour.refuse
                and process.exit_status is None
                and self.now >= process.started_at + process.behaviour.load_s
            ):
                process.exit_status, process.last_error = process.behaviour.status, process.behaviour.refuse
                self._tell(process.spec, EventKind.EXITED)

    def _remove(self, process: FakeProcess) -> None:
        if self.processes.get(process.spec.replica_id) is process:
            del self.processes[process.spec.replica_id]
        process.gone.set()

    def _tell(self, spec: ReplicaSpec, kind: EventKind) -> None:
        self._events.tell(spec.replica_id, spec.epoch, kind)
