"""Keeps one replica of a deployment running: starts it, watches it, replaces it when it is dead or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from toque.fleet.placement.base import Observed, Placement, ReplicaSpec
from toque.fleet.restart import RestartPolicy
from toque.routing.base import ReplicaEntry, ReplicaState

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Health:
    """What routing sees of a replica: its state, and for how long it has said nothing."""

    state: ReplicaState
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HangBounds:
    """A replica is replaced when it has said nothing for ``silent_s`` (its heartbeat is half a second), when it has been
    degraded (no step finishes) for ``degraded_s``, or when it lives on without its session for ``lost_s``."""

    silent_s: float = 6.0
    degraded_s: float = 60.0
    lost_s: float = 2.0


class Supervisor:
    """One replica, whichever process is it at the moment. `entry` is its row for routing's table.

    A dead process is seen at once, a hanging one within ``bounds``. Each restart is a new epoch at a new address, so
    that nothing can reach a stale process. ``on_change`` is called in the event loop whenever `entry` changed.
    """

    def __init__(
        self,
        replica_id: str,
        placement: Placement,
        spec_of: Callable[[int], ReplicaSpec],
        health_of: Callable[[ReplicaEntry], Health | None],
        *,
        on_change: Callable[[], None],
        policy: RestartPolicy | None = None,
        bounds: HangBounds | None = None,
        first_epoch: int = 1,
    ) -> None:
        self._placement = placement
        self._spec_of = spec_of
        self._health_of = health_of
        self._on_change = on_change
        self._policy = policy or RestartPolicy()
        self._bounds = bounds or HangBounds()
        self._epoch = first_epoch
        self._task: asyncio.Task[None] | None = None
        self._stirred = asyncio.Event()
        self.entry = ReplicaEntry(replica_id, first_epoch, "")

    @property
    def restarts(self) -> int:
        return self._policy.restarts

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"supervise {self.entry.replica_id}"
        )

    async def stop(self, grace_s: float) -> None:
        """The replica finishes what it has within the grace, and is gone when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._say(ReplicaState.DRAINING, "shutting down")
        # A moment more than it gives itself: it ends what is left of its requests with an error of its own.
        await self._placement.stop(self.entry.replica_id, self._epoch, grace_s + 1.0 if grace_s else 0.0)
        self._say(ReplicaState.DEAD, "shut down")

    def stir(self) -> None:
        """Something may have changed: look now rather than at the next poll."""
        self._stirred.set()

    async def _run(self) -> None:
        listening = asyncio.get_running_loop().create_task(self._listen())
        reason = ""
        try:
            while True:
                spec = self._spec_of(self._epoch)
                self.entry = ReplicaEntry(
                    spec.replica_id, spec.epoch, spec.address, ReplicaState.STARTING, reason
                )
                self._on_change()
                await self._placement.ensure(spec)
                life = _Life(self._bounds)
                ended = await self._watch(spec, life)
                await self._placement.stop(spec.replica_id, spec.epoch, 0.0)
                restart = self._policy.ended(ready_s=life.ready_s(), status=ended.exit_status)
                reason = f"restarted after: {ended.last_error or 'it ended'}"
                self._epoch += 1
                if restart.hopeless:
                    self._say(ReplicaState.DEAD, ended.last_error)
                    reason = ended.last_error
                elif restart.delay_s:
                    self._say(ReplicaState.STARTING, f"{reason}, in {restart.delay_s:g} s")
                await asyncio.sleep(restart.delay_s)
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        async for event in self._placement.watch():
            if event.replica_id == self.entry.replica_id:
                self.stir()

    async def _watch(self, spec: ReplicaSpec, life: _Life) -> Observed:
        """Returns how the process ended, or why it has to."""
        while True:
            observed = next(
                (
                    o
                    for o in await self._placement.list()
                    if (o.replica_id, o.epoch) == (spec.replica_id, spec.epoch)
                ),
                None,
            )
            if observed is None:
                return Observed(spec.replica_id, spec.epoch, spec.address, "", None, "it is gone")
            if observed.exit_status is not None:
                return observed
            hang = life.judge(time.monotonic(), self._health_of(self.entry))
            if hang:
                return Observed(spec.replica_id, spec.epoch, spec.address, observed.handle, None, hang)
            self._stirred.clear()
            # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._stirred.wait()

    def _say(self, state: ReplicaState, reason: str) -> None:
        old = self.entry
        self.entry = ReplicaEntry(old.replica_id, old.epoch, old.address, state, reason)
        self._on_change()


class _Life:
    """What has been seen of one process. Times are monotonic seconds, given by the caller."""

    def __init__(self, bounds: HangBounds) -> None:
        self._bounds = bounds
        self._ready_since: float | None = None
        self._since: dict[ReplicaState, float] = {}  # of the state it is in now
        self._looked: float | None = None
        self._awake_since = 0.0

    def ready_s(self) -> float | None:
        return None if self._ready_since is None or self._looked is None else self._looked - self._ready_since

    def judge(self, now: float, health: Health | None) -> str:
        """Why this process has to be replaced; "" if it has not."""
        if self._looked is None or now - self._looked > 10 * POLL_S:
            # We did not run ourselves for a while (stopped, starved): what it said meanwhile is yet to be read.
            self._awake_since = now
        self._looked = now
        if health is None:
            return ""
        if health.state not in self._since:
            self._since = {health.state: now}
        lasted = now - max(self._since[health.state], self._awake_since)
        if health.state is ReplicaState.READY and self._ready_since is None:
            self._ready_since = now
        silent = min(health.silent_s, now - self._awake_since)
        if silent > self._bounds.silent_s:
            return f"it hung: nothing heard for {silent:.0f} s"
        if health.state is ReplicaState.DEGRADED and lasted > self._bounds.degraded_s:
            return f"it hung: no step finished for {lasted:.0f} s"
        if health.state is ReplicaState.DEAD and lasted > self._bounds.lost_s:
            return "its session was lost"
        return ""
