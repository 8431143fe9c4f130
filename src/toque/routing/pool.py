"""Several replicas of one deployment as one EngineClient."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import fields

from toque.errors import (
    DeadlineError,
    QueueFullError,
    ReplicaDiedError,
    ToqueError,
    UnavailableError,
    VersionGoneError,
)
from toque.routing.base import OnRoute, ReplicaEntry, ReplicaState, RoutingTable
from toque.routing.hedge import Racer, first_to_speak, speaks_within
from toque.routing.journey import Journey, MoveBounds, engine_gave_up
from toque.routing.line import WaitingLine
from toque.routing.policies import policy_named
from toque.routing.policies.base import Key
from toque.routing.target import Attempt, OpenSession, Session, Target, open_session
from toque.routing.version_client import VersionClient
from toque.types import EngineRequest, EngineStats, ModelCard, SamplingParams, SequenceOutput

_BEST_FIRST = (
    ReplicaState.READY,
    ReplicaState.DEGRADED,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.DEAD,
)
_SERVING = (ReplicaState.READY, ReplicaState.DEGRADED)
_RECHECK_S = 0.5  # deadlines pass without an event
_WATCH_S = 0.2  # silence is no event: it has to be looked for
SILENCE_S = 1.5  # a replica is heard twice a second, whatever it does
STUCK_S = 3.0
_NOTHING = EngineRequest("", (), SamplingParams())


class ReplicaPool:
    """Sends each request to one of the replicas in the table that `apply` was last given. An EngineClient.

    A request whose replica dies, is silent for ``stuck_s`` or gives it up goes to another of the same version: as it
    was while nothing of its answer has arrived, else with the tokens that have, so that the answer goes on where it
    was and its reader notices a pause at most. `MoveBounds` ends that for a request that kills replicas.

    While no replica can take it, but one is coming up (or an arrival wakes one, or arrivals are held), a request waits
    at most ``wait_s``, in the order of arrival; at most ``max_waiting`` new ones wait, the next gets QueueFullError.
    What had been accepted before always may. ``on_wait`` hears of each that begins to wait.

    With ``hedge_after_s`` a request that has no first token after so long goes to a second replica besides, and the
    one that speaks first goes on.
    """

    def __init__(
        self,
        name: str,
        *,
        wait_s: float = 30.0,
        max_waiting: int = 256,
        bounds: MoveBounds | None = None,
        silence_s: float = SILENCE_S,
        stuck_s: float = STUCK_S,
        hedge_after_s: float = 0.0,
        open_session: OpenSession = open_session,
        on_change: Callable[[], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._bounds = bounds or MoveBounds()
        self._silence_s = silence_s
        self._stuck_s = stuck_s
        self._hedge_after_s = hedge_after_s
        self._open_session = open_session
        self._on_change = on_change
        self._on_wait = on_wait
        self.table = RoutingTable(name)
        self._policy = policy_named(self.table.policy)
        self._targets: dict[Key, Target] = {}
        self._able: dict[str | None, list[Target]] = {}  # the best ones, by version; emptied by any change
        self._resting: set[Key] = set()  # whose breaker is open
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._waiting_since: dict[Journey, float] = {}
        self._line = WaitingLine(_RECHECK_S)
        self._card: ModelCard | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._watched_at = 0.0
        self._awake_since = 0.0

    def apply(self, table: RoutingTable) -> None:
        """The fleet's table: sessions are opened for what is new in it and closed for what is gone or dead.

        Raises ConfigError for a policy that does not exist; then nothing has changed."""
        if table.policy != self.table.policy:
            self._policy = policy_named(table.policy)
        self.table = table
        entries = {(entry.replica_id, entry.epoch): entry for entry in table.entries}
        for key in list(self._targets):
            entry = entries.get(key)
            if entry is None or entry.state is ReplicaState.DEAD:
                self._close(self._targets.pop(key))
            else:
                self._targets[key].entry = entry
        for key, entry in entries.items():
            if key not in self._targets and entry.state is not ReplicaState.DEAD:
                session = self._open_session(entry, self._notify)
                self._targets[key] = Target(entry, session)
                session.start()
        if self._watch is None and self._targets:
            self._begin_watch()
        self._notify()

    async def close(self) -> None:
        """Ends every session; requests that wait fail with UnavailableError."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for target in self._targets.values():
            self._close(target)
        self._targets.clear()
        self.table = RoutingTable(self.name)
        self._notify()
        if self._closing:
            await asyncio.wait(self._closing)

    # What is known of it

    @property
    def state(self) -> ReplicaState:
        """The best state of any replica."""
        return self.condition()[0]

    @property
    def reason(self) -> str:
        return self.condition()[1]

    @property
    def card(self) -> ModelCard | None:
        """The model as the first replica that loaded it described it."""
        for target in self._targets.values():
            self._card = self._card or target.session.card
        return self._card

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""
        return len(self._waiting_since)

    @property
    def waiting_s(self) -> float:
        """How long the one that has waited longest has."""
        oldest = min(self._waiting_since.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    @property
    def stranded(self) -> dict[str, int]:
        """How many of those that wait had a replica before, by the only version that may answer them."""
        moved = (j.version for j in self._waiting_since if j.moves and j.version is not None)
        return dict(Counter(moved))

    @property
    def running(self) -> int:
        """Requests that a replica has, of this process's."""
        return sum(target.load.in_flight for target in self._targets.values())

    def session(self, replica_id: str, epoch: int) -> Session | None:
        target = self._targets.get((replica_id, epoch))
        return None if target is None else target.session

    def stats(self) -> EngineStats:
        """The sum over the replicas; ``waiting`` includes those that wait here."""
        every = [target.session.stats() for target in self._targets.values()]
        sums = {f.name: sum(getattr(stats, f.name) for stats in every) for f in fields(EngineStats)}
        sums["waiting"] += self.waiting
        return EngineStats(**sums)

    def replica_stats(self) -> dict[str, EngineStats]:
        """Each replica's own, by its id; of a replica that is being replaced, its newest process's."""
        return {key[0]: target.session.stats() for key, target in sorted(self._targets.items())}

    def replica_conditions(self) -> dict[str, tuple[ReplicaState, str]]:
        """Each replica's state and its reason, by its id."""
        dead = {e.replica_id: (e.state, e.reason) for e in self.table.entries if e.state is ReplicaState.DEAD}
        return dead | {key[0]: target.condition() for key, target in sorted(self._targets.items())}

    def in_rotation(self, version: str | None = None) -> list[Key]:
        """The processes that a new request might be sent to."""
        return [target.key for target in self._able_of(version)]

    def of(self, version: str) -> VersionClient:
        """The replicas of one version."""
        return VersionClient(self, version)

    def condition(self, version: str | None = None) -> tuple[ReplicaState, str]:
        """The best state of any replica (of the version), and why it is no better."""
        conditions = [target.condition() for target in self._of(version)]
        conditions += [
            (entry.state, entry.reason)
            for entry in self._entries_of(version)
            if entry.state is ReplicaState.DEAD
        ]
        if not conditions:
            return ReplicaState.STARTING, self.table.reason or "no replica has been started"
        return min(conditions, key=lambda c: _BEST_FIRST.index(c[0]))

    def takes(self, version: str) -> bool:
        """Whether a new request of this version would be sent at once."""
        return not self.table.held and bool(self._able_of(version))

    def may_take(self, version: str) -> bool:
        """Whether a request of this version that waits might be sent some day."""
        return self._hope(Journey(_NOTHING, version, None, self._bounds))

    def stir(self) -> None:
        """Have those who wait look again."""
        self._notify()

    def place(self) -> int:
        """A place in the line of those who wait for a change of this: behind all who have one."""
        return self._line.place()

    async def changed(self, until: float, place: int | None = None) -> None:
        """Returns when something of this changed, at ``until`` (monotonic seconds), or earlier. Who has no ``place``
        is told after those who waited before."""
        await self._line.changed(self.place() if place is None else place, until)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once a replica takes requests. Raises UnavailableError with the reason when none will."""
        place, until = self.place(), time.monotonic() + timeout_s
        while self.state not in _SERVING:
            if self.state is ReplicaState.DEAD or time.monotonic() >= until:
                raise UnavailableError(f"{self.name} is {self.state}: {self.reason}")
            await self.changed(until, place)

    # Requests

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None, version: str | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        """``version``: the only one that may answer. VersionGoneError: nothing had arrived, and it serves no more."""
        journey = Journey(request, version, on_route, self._bounds)
        while True:
            attempt = Attempt(await self._choose(journey))
            journey.sent(attempt.target.key, attempt.target.entry.version)
            asked = journey.request
            if self._hedge_after_s and not journey.started:
                source = self._hedged(journey, attempt, asked)
            else:
                source = attempt.target.session.generate(asked)
            try:
                async with aclosing(source) as outputs:
                    async for output in outputs:
                        if output.finish_reason is not None and engine_gave_up(output):
                            self._failed(attempt)
                            error = ReplicaDiedError(output.error or "the engine gave the request up")
                            if journey.failed(attempt.target.key, error, died=True) and self._hope(journey):
                                break
                            yield journey.arrived(output)
                            return
                        if not attempt.told:
                            self._succeeded(attempt)
                        yield journey.arrived(output)
                    else:
                        return
            except (UnavailableError, QueueFullError, ReplicaDiedError) as refused:
                target = attempt.target
                dead = target.session.state is ReplicaState.DEAD
                if not isinstance(refused, QueueFullError) and self._is_fault(target):
                    self._failed(attempt)
                again = journey.failed(target.key, refused, died=dead, silent=target.silent and not dead)
                if not again or not self._hope(journey):
                    raise journey.ending(refused) from None
            finally:
                attempt.end()

    async def _hedged(
        self, journey: Journey, attempt: Attempt, asked: EngineRequest
    ) -> AsyncGenerator[SequenceOutput, None]:
        """The answer of the replica of ``attempt``, or, if it says nothing for too long, of whichever of two speaks
        first: ``attempt`` is that one's then."""
        racers = [Racer(attempt.target.session.generate(asked))]
        other: Attempt | None = None
        try:
            winner = racers[0]
            if not await speaks_within(winner, self._hedge_after_s):
                second = self._second(journey, attempt.target)
                if second is not None:
                    other = Attempt(second)
                    journey.hedged(second.key, second.entry.version, self._hedge_after_s)
                    racers.append(Racer(second.session.generate(asked)))
                    winner = await first_to_speak(*racers)
                    if winner is racers[1]:
                        attempt.target, other.target = other.target, attempt.target
                    if not winner.refused:
                        journey.won(attempt.target.key, attempt.target.entry.version)
                    other.end()
                    await racers[winner is racers[0]].close()
            with suppress(StopAsyncIteration):
                yield await winner.first
                async for output in winner.outputs:
                    yield output
        finally:
            for racer in racers:
                await racer.close()
            if other is not None:
                other.end()

    def _second(self, journey: Journey, first: Target) -> Target | None:
        able = [
            target
            for target in self._able_of(journey.version)
            if target is not first and target.key not in journey.tried
        ]
        return able[self._policy.choose(journey.request, able)] if able else None

    def _is_fault(self, target: Target) -> bool:
        """Whether a refusal tells against the replica: one that said it was ready, or was silent."""
        return target.silent or target.session.state is ReplicaState.READY

    async def _choose(self, journey: Journey) -> Target:
        target = self._pick(journey)
        if target is not None:
            return target
        if self.waiting >= self._max_waiting and not journey.moves:
            raise QueueFullError(
                f"{self.waiting} requests wait for a replica of {self.name}, the most allowed"
            )
        place, began = self.place(), time.monotonic()
        until = began + self._wait_s
        journey.held(self.reason or self.state.value)
        self._waiting_since[journey] = began
        try:
            if self._on_wait is not None:
                self._on_wait()
            while target is None:
                self._check_hope(journey, until)
                await self.changed(until, place)
                target = self._pick(journey)
        finally:
            del self._waiting_since[journey]
        return target

    def _check_hope(self, journey: Journey, until: float) -> None:
        if not self._hope(journey):
            if not journey.started and self._serves_others(journey.version):
                raise VersionGoneError(
                    f"the version of {self.name} that was to answer is not served any more"
                )
            raise self._nobody(journey)
        if time.monotonic() >= until:
            raise self._nobody(journey)
        if journey.deadline is not None and time.time() >= journey.deadline:
            raise DeadlineError("the deadline passed before a replica could take the request")

    def _nobody(self, journey: Journey) -> ToqueError:
        state, reason = self.condition(journey.version)
        return journey.ending(
            UnavailableError(f"no replica of {self.name} can answer: {reason or state.value}")
        )

    def _serves_others(self, version: str | None) -> bool:
        return version is not None and any(
            share > 0 for v, share in self.table.shares.items() if v != version
        )

    def _pick(self, journey: Journey) -> Target | None:
        if self.table.held and not journey.moves:
            return None
        able = self._able_of(journey.version)
        if journey.tried:
            able = [target for target in able if target.key not in journey.tried]
            if not able:
                able = [
                    target
                    for target in self._serving_of(journey.version)
                    if target.key not in journey.tried and not target.silent
                ]
        if not able:
            return None
        if self._resting:
            now = time.monotonic()
            able = [target for target in able if target.breaker.allows(now)] or able
        return able[self._policy.choose(journey.request, able)]

    def _failed(self, attempt: Attempt) -> None:
        attempt.told = True
        attempt.target.breaker.failed(time.monotonic())
        if attempt.target.breaker.open:
            self._resting.add(attempt.target.key)

    def _succeeded(self, attempt: Attempt) -> None:
        attempt.told = True
        attempt.target.breaker.succeeded()
        self._resting.discard(attempt.target.key)

    def _able_of(self, version: str | None) -> list[Target]:
        """The replicas that new requests go to: the ready ones that are heard; else any that serve at all."""
        able = self._able.get(version)
        if able is None:
            serving = self._serving_of(version)
            able = [t for t in serving if not t.silent and t.session.state is ReplicaState.READY]
            self._able[version] = able = able or serving
        return able

    def _serving_of(self, version: str | None) -> list[Target]:
        return [
            target
            for target in self._targets.values()
            if (version is None or target.entry.version == version) and target.condition()[0] in _SERVING
        ]

    def _hope(self, journey: Journey) -> bool:
        """Whether a replica that has not refused this request takes requests or may come up."""
        if self._closed:
            return False
        version = journey.version
        if version is not None and version not in self.table.versions:
            return False
        refused = False
        for target in self._of(version):
            state = target.condition()[0]
            if state is ReplicaState.STARTING or (state in _SERVING and target.key not in journey.tried):
                return True
            refused = refused or state in _SERVING
        entries = self._entries_of(version)
        wanted = version is None or self.table.shares.get(version, 0.0) > 0.0
        if version in self.table.leaving and journey.moves and not refused:
            # What it has begun it finishes: the fleet starts a replica for that, where there is none.
            failed = any(entry.state is ReplicaState.DEAD and entry.epoch for entry in entries)
            return not failed and (journey.started or not self._serves_others(version))
        if self.table.asleep or self.table.held or not entries:
            return wanted
        if refused or any(entry.state is ReplicaState.DEAD for entry in entries):
            return False
        # All are draining: others will come, where the fleet says which.
        return wanted and version is not None

    def _of(self, version: str | None) -> list[Target]:
        targets = self._targets.values()
        return [target for target in targets if version is None or target.entry.version == version]

    def _entries_of(self, version: str | None) -> list[ReplicaEntry]:
        return [entry for entry in self.table.entries if version is None or entry.version == version]

    # Changes

    def _close(self, target: Target) -> None:
        self._policy.forget(target.key)
        self._resting.discard(target.key)
        task = asyncio.get_running_loop().create_task(target.session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _notify(self) -> None:
        self._able.clear()
        self._line.wake()
        if self._on_change is not None:
            self._on_change()

    def _begin_watch(self) -> None:
        self._watched_at = self._awake_since = time.monotonic()
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def _look(self) -> None:
        """Who has gone silent, who is heard again; streams on a silent replica move where there is another."""
        now = time.monotonic()
        if now - self._watched_at > 1.0:
            # We did not run ourselves for a while (stopped, starved): what was said meanwhile is yet to be read.
            self._awake_since = now
        self._watched_at = now
        moved = False
        awake = now - self._awake_since
        for target in self._targets.values():
            target.silent_s = min(target.session.silent_s, awake)
            silent = target.silent_s > self._silence_s
            if silent is not target.silent:
                target.silent = silent
                moved = True
        if moved:
            self._notify()
        for target in list(self._targets.values()):
            if target.silent_s > self._stuck_s and target.load.in_flight and self._another(target):
                target.session.abandon(f"nothing heard for {target.silent_s:.1f} s")
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look) if self._targets else None

    def _another(self, target: Target) -> bool:
        return any(
            not other.silent and other.session.state is ReplicaState.READY and other is not target
            for other in self._able_of(target.entry.version)
        )
