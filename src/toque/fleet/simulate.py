"""A day of traffic through the autoscaler in about a second: replicas and requests as events, and `decide` as it is.

A replica shares its speed among the streams it runs, and the speed grows with their number as it was measured of the
real engine; a prompt counts as so many generated tokens as it takes time. It has a machine of its own. What comes
while no replica answers, or all of them are full, waits in one line.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC
from math import cos, pi
from random import Random

from toque.fleet.autoscaler import ScalingMemory, ScalingObservation, decide
from toque.fleet.spec import ScalingPolicy

DAY_S = 86_400.0
_TICK, _DONE, _READY = range(3)


@dataclass(frozen=True, slots=True)
class Speed:
    """What one replica can do. ``decode`` holds measured (streams, generated tokens/s of all of them together), by
    rising number of streams; ``prefill`` is in prompt tokens/s."""

    decode: tuple[tuple[int, float], ...] = ((1, 208.0), (4, 485.0), (16, 634.0), (64, 746.0))
    prefill: float = 1174.0
    max_sequences: int = 64
    kv_tokens: int = 65_536
    start_s: float = 0.6  # from being asked for until it answers

    def of(self, streams: int) -> float:
        """Generated tokens per second of so many streams together, between the measured points by straight lines."""
        before = (0, 0.0)
        for point in self.decode:
            if streams <= point[0]:
                return before[1] + (point[1] - before[1]) * (streams - before[0]) / (point[0] - before[0])
            before = point
        return before[1]


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds since midnight
    prompt: int  # tokens
    output: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A day in numbers. ``queue_s``: sorted, of each request: from its arrival until a replica began it;
    ``token_s``: sorted, of each request: its replica time per generated token."""

    requests: int
    replica_hours: float
    starts: int
    wakes: int  # starts from zero
    most: int  # replicas at once
    queue_s: tuple[float, ...] = field(repr=False)
    token_s: tuple[float, ...] = field(repr=False)
    reasons: tuple[tuple[float, int, str], ...] = field(repr=False)  # of each change: when, to how many, why

    def queue(self, quantile: float) -> float:
        return self.queue_s[min(int(quantile * len(self.queue_s)), len(self.queue_s) - 1)]

    def token(self, quantile: float) -> float:
        return self.token_s[min(int(quantile * len(self.token_s)), len(self.token_s) - 1)]


def bursty_day(seed: int, *, peak_per_s: float = 1.6, bursts: int = 12) -> list[Arrival]:
    """Busy at 14:00, a request every 20 minutes at night; ``bursts`` of 2 to 5 requests a second for one to five
    minutes in the day, and two of 20 requests at once at night. Lengths are log-normal, 400 prompt tokens and 500
    generated ones in the mean."""
    random = Random(seed)

    def lengths() -> tuple[int, int]:
        prompt, output = random.lognormvariate(5.7, 0.8), random.lognormvariate(5.9, 0.8)
        return max(1, int(prompt)), min(4096, max(1, int(output)))

    found: list[Arrival] = []
    at, night = 0.0, 1 / 1200
    while (at := at + random.expovariate(peak_per_s + night)) < DAY_S:
        hours = at / 3600
        day = cos((hours - 14) / 16 * pi) ** 1.5 if 6 < hours < 22 else 0.0
        if random.random() * (peak_per_s + night) < night + peak_per_s * day:
            found.append(Arrival(at, *lengths()))
    for _ in range(bursts):
        at = random.uniform(7.5, 21.5) * 3600
        end, rate = at + random.uniform(60, 300), random.uniform(2.0, 5.0)
        while (at := at + random.expovariate(rate)) < end:
            found.append(Arrival(at, *lengths()))
    for hour in (2.25, 4.5):
        begin = hour * 3600 + random.uniform(0, 600)
        found += [Arrival(begin + number * 0.002, *lengths()) for number in range(20)]
    return sorted(found, key=lambda arrival: arrival.at)


class _Replica:
    """Streams share its speed. ``served`` is what each of them has had so far, in generated tokens: one ends when
    that has grown by its own work, so nothing has to be counted per stream."""

    __slots__ = ("asked_at", "draining", "finishing", "label", "ready", "seen", "served", "speeds", "tokens")

    def __init__(self, label: int, asked_at: float, speeds: Sequence[float]) -> None:
        self.label = label
        self.asked_at = asked_at
        self.speeds = speeds
        self.ready = False
        self.draining = False
        self.served = 0.0
        self.seen = asked_at
        self.finishing: list[
            tuple[float, int, float, int, int]
        ] = []  # (served then, order, begun, output, tokens)
        self.tokens = 0  # in the KV cache, at the end of those that run

    def advance(self, now: float) -> None:
        streams = len(self.finishing)
        if streams:
            self.served += (now - self.seen) * self.speeds[streams] / streams
        self.seen = now

    def next_end(self) -> float:
        streams = len(self.finishing)
        return self.seen + max(0.0, self.finishing[0][0] - self.served) * streams / self.speeds[streams]


class Simulation:
    """One deployment for a day. ``fixed``: so many replicas all day, no autoscaler."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        policy: ScalingPolicy,
        speed: Speed,
        *,
        fixed: int = 0,
        tick_s: float = 2.0,
    ) -> None:
        self._arrivals = arrivals
        self._policy = policy
        self._speed = speed
        self._fixed = fixed
        self._tick_s = tick_s
        self._speeds = [speed.of(streams) for streams in range(speed.max_sequences + 1)]
        self._events: list[tuple[float, int, int, int]] = []  # (when, order, kind, replica's label)
        self._order = 0
        self._replicas: dict[int, _Replica] = {}
        self._waiting: deque[Arrival] = deque()
        self._memory = ScalingMemory()
        self._target = 0
        self._idle_since = 0.0
        self._ticking = False
        self._starts = self._wakes = self._most = 0
        self._hours = 0.0
        self._queue: list[float] = []
        self._token: list[float] = []
        self._reasons: list[tuple[float, int, str]] = []

    def run(self) -> Figures:
        if self._fixed:
            self._aim(0.0, self._fixed, "fixed")
            for replica in self._replicas.values():
                replica.ready = True
        else:
            self._tick(0.0)
        now = 0.0
        for arrival in self._arrivals:
            while self._events and self._events[0][0] <= arrival.at:
                now, _, kind, label = heapq.heappop(self._events)
                self._happen(now, kind, label)
            now = arrival.at
            self._waiting.append(arrival)
            self._place(now)
            if not self._fixed and self._target == 0:  # a gateway tells of it at once
                self._decide(now)
                if not self._ticking:
                    self._again(now)
        while self._events and (self._events[0][0] <= DAY_S or self._requests()):
            now, _, kind, label = heapq.heappop(self._events)
            self._happen(now, kind, label)
        end = max(now, DAY_S)
        self._hours += sum(end - replica.asked_at for replica in self._replicas.values()) / 3600
        return Figures(
            len(self._queue),
            self._hours,
            self._starts,
            self._wakes,
            self._most,
            tuple(sorted(self._queue)),
            tuple(sorted(self._token)),
            tuple(self._reasons),
        )

    def _happen(self, now: float, kind: int, label: int) -> None:
        if kind == _TICK:
            self._tick(now)
        elif (replica := self._replicas.get(label)) is None:
            return
        elif kind == _READY:
            replica.ready = True
            replica.seen = now
            self._place(now)
        elif replica.finishing and replica.next_end() <= now + 1e-9:
            self._end(now, replica)

    def _end(self, now: float, replica: _Replica) -> None:
        replica.advance(now)
        _, _, begun, output, tokens = heapq.heappop(replica.finishing)
        replica.tokens -= tokens
        self._token.append((now - begun) / output)
        if replica.finishing:
            self._at(replica.next_end(), _DONE, replica.label)
        elif replica.draining:
            self._gone(now, replica)
        self._place(now)
        if not self._requests():
            self._idle_since = now

    def _place(self, now: float) -> None:
        while self._waiting:
            free = [r for r in self._replicas.values() if r.ready and not r.draining]
            replica = min(free, key=lambda r: len(r.finishing), default=None)
            if replica is None or len(replica.finishing) >= self._speed.max_sequences:
                return
            arrival = self._waiting.popleft()
            self._queue.append(now - arrival.at)
            replica.advance(now)
            streams = min(len(replica.finishing) + 1, self._speed.max_sequences)
            work = arrival.output + arrival.prompt * self._speeds[streams] / self._speed.prefill
            tokens = arrival.prompt + arrival.output
            self._order += 1
            heapq.heappush(
                replica.finishing, (replica.served + work, self._order, now, arrival.output, tokens)
            )
            replica.tokens += tokens
            self._at(replica.next_end(), _DONE, replica.label)

    def _tick(self, now: float) -> None:
        self._decide(now)
        self._again(now)

    def _again(self, now: float) -> None:
        # Asleep, nothing happens before the next arrival or the next window.
        asleep = not self._target and not self._requests()
        self._ticking = not asleep or bool(self._policy.keep_warm)
        if self._ticking:
            self._at(now + (30.0 if asleep else self._tick_s), _TICK, 0)

    def _decide(self, now: float) -> None:
        up = [replica for replica in self._replicas.values() if not replica.draining]
        ready = [replica for replica in up if replica.ready]
        requests = self._requests()
        decision = decide(
            self._policy,
            ScalingObservation(
                now=now,
                replicas=self._target,
                ready=len(ready),
                epoch_s=now + 4 * DAY_S,  # a Monday
                zone=UTC,
                waiting=len(self._waiting),
                waiting_s=now - self._waiting[0].at if self._waiting else 0.0,
                running=requests - len(self._waiting),
                tokens_per_second=self._speeds[-1],
                kv_usage=sum(r.tokens for r in ready) / (self._speed.kv_tokens * max(1, len(ready))),
                idle_s=0.0 if requests else now - self._idle_since,
            ),
            self._memory,
        )
        self._memory = decision.memory
        if decision.replicas != self._target:
            self._aim(now, decision.replicas, decision.reason)

    def _aim(self, now: float, target: int, reason: str) -> None:
        self._reasons.append((now, target, reason))
        up = [replica for replica in self._replicas.values() if not replica.draining]
        if self._target == 0 and target and now:
            self._wakes += 1
        for _ in range(target - len(up)):
            self._order += 1
            self._starts += 1
            replica = _Replica(self._order, now, self._speeds)
            self._replicas[replica.label] = replica
            self._at(now + self._speed.start_s, _READY, replica.label)
        for replica in sorted(up, key=lambda r: (r.ready, len(r.finishing)))[: max(0, len(up) - target)]:
            replica.draining = True
            if not replica.finishing:
                self._gone(now, replica)
        self._target = target
        self._most = max(self._most, len(self._replicas))

    def _gone(self, now: float, replica: _Replica) -> None:
        self._hours += (now - replica.asked_at) / 3600
        del self._replicas[replica.label]

    def _requests(self) -> int:
        return len(self._waiting) + sum(len(replica.finishing) for replica in self._replicas.values())

    def _at(self, when: float, kind: int, label: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, label))
