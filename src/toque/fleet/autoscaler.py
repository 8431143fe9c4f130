"""How many replicas a deployment shall have: a pure function of what is seen and what was seen before.

Up fast: more work than the replicas are meant to have, for ``upscale_delay_s``, is answered by as many as the work
asks for; a queue that takes too long, a full KV cache or a late first token by up to twice as many as answer now, and
then not again before these answer. Down slowly: to the most that was needed at any moment of ``downscale_delay_s``, by
a measure that leaves a fifth of each replica free, so that a load at the edge does not start and stop one in turns;
a step down that has to be taken back soon makes the next one wait twice as long. To zero after
``downscale_to_zero_delay_s`` without any request. From zero one replica is started, however many requests wait: what
one can do, and how long a start takes, is only known once it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from math import ceil

from toque.fleet.spec import KeepWarm, ScalingPolicy

FREE_BELOW = 0.8  # a replica less is asked for only where the rest would be this full at most
MOST_GROWTH = 2.0  # of the replicas that answer, for signals which do not say how many are missing
MOST_PATIENCE = 16  # times the down delay
WAKE_SETTLES_S = 10.0  # at most so long is the backlog of a wake left to the one that was started
TTFT_WINDOW_S = 60.0  # what `ScalingObservation.ttft_p95_s` is taken over
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class ScalingObservation:
    """A deployment at one instant, over all gateways and replicas.

    ``now``: seconds on any clock that never goes back; ``epoch_s``: the wall clock, which only the keep-warm windows
    read, in ``zone`` (None: the machine's). ``replicas`` are wanted so far, ``ready`` of them answer. ``waiting``
    requests are at gateways because no replica has them, the first since ``waiting_s``; replicas have begun
    ``running`` and not yet begun ``queued``, with ``queued_tokens`` prompt tokens. ``tokens_per_second``: what one
    replica does while it computes (0: not known yet). ``kv_usage``: mean of the replicas that answer.
    ``ttft_p95_s``: over the last minute (0: no request). ``idle_s``: since the last request anywhere (0 while there is
    one). ``max_possible``: replicas that the machines have room for, those that run included (None: no bound).
    """

    now: float
    replicas: int
    ready: int
    epoch_s: float = 0.0
    waiting: int = 0
    waiting_s: float = 0.0
    running: int = 0
    queued: int = 0
    queued_tokens: int = 0
    tokens_per_second: float = 0.0
    kv_usage: float = 0.0
    ttft_p95_s: float = 0.0
    idle_s: float = 0.0
    max_possible: int | None = None
    zone: tzinfo | None = None

    @property
    def requests(self) -> int:
        """All of them, wherever they are."""
        return self.waiting + self.queued + self.running

    @property
    def queue_s(self) -> float:
        """How long a request that comes now waits for its turn: by the queued work, or as long as one has waited."""
        if not self.ready:
            return 0.0  # nothing is known of replicas that are yet to come
        work = self.tokens_per_second * self.ready
        return max(self.queued_tokens / work if work > 0 else 0.0, self.waiting_s if self.waiting else 0.0)


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What `decide` carries from one call to the next. A fresh one takes the first observation's replicas as needed,
    and its moment as the last time a request was there: a restarted controller stops nothing in a hurry."""

    needs: tuple[
        tuple[float, int], ...
    ] = ()  # (when, how many), the highest first: all within the down delay
    over_since: float | None = None  # since when more were needed than wanted
    busy_at: float | None = None  # when a request was last seen
    asked_at: float | None = None  # when replicas were asked for that do not answer yet
    woken: bool = False  # those were asked for at zero
    start_s: float = 0.0  # what the last start took, until all answered
    settled_at: float | None = None  # before that the backlog of a wake is no reason for more
    ttft_after: float | None = None  # before that the p95 still shows the time before the last step up
    down_at: float | None = None  # the last step down that was not to zero
    patience: int = 1  # what the down delay is multiplied with


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # for people
    memory: ScalingMemory


def decide(policy: ScalingPolicy, observation: ScalingObservation, memory: ScalingMemory) -> Decision:
    """How many replicas there shall be from now on, within ``policy``'s bounds and the machine's room.

    Never 0 while there is a request and room for a replica; never fewer than `ScalingPolicy.keep_warm` asks for.
    """
    seen = observation
    memory = _remember(seen, memory)
    least, why_least = _least(policy, seen, memory)
    most = policy.max_replicas
    if seen.max_possible is not None:
        most = min(most, max(seen.max_possible, seen.ready))

    up, why_up = _needed(policy, seen, memory)
    if up > most:
        bound = "at most" if most == policy.max_replicas else "room for"
        up, why_up = most, f"{why_up}; {up} wanted, {bound} {most}"
    if seen.requests == 0 and _idle_s(seen, memory) >= policy.downscale_to_zero_delay_s:
        down = 0
    else:
        down = max(1, _comfortable(policy, seen))
    delay = policy.downscale_delay_s * memory.patience
    memory = replace(memory, needs=_highest(memory.needs, seen.now, max(down, least), delay))
    lowest = 0 if max(down, least) == 0 else max(1, memory.needs[0][1])

    wanted, reason = seen.replicas, why_up if up == most == seen.replicas else f"steady: {_load(seen)}"
    if wanted == 0 and seen.requests:
        wanted, reason = 1, f"woken by {_count(seen.requests, 'request')}"
        memory = replace(memory, woken=True)
    elif up > wanted:
        since = seen.now if memory.over_since is None else memory.over_since
        memory = replace(memory, over_since=since)
        if seen.now - since >= policy.upscale_delay_s and _settled(seen, memory):
            wanted, reason = up, why_up
        else:
            reason = f"{why_up}, for {seen.now - since:.1f} s so far"
    elif lowest < wanted:
        wanted = lowest
        reason = f"idle for {_idle_s(seen, memory):.0f} s" if lowest == 0 else f"fewer suffice: {_load(seen)}"
    if up <= seen.replicas:
        memory = replace(memory, over_since=None)

    if wanted < least:
        wanted, reason = least, why_least
    if wanted > most:
        reason = f"{reason}; {wanted} wanted, room for {most}"
        wanted = most
    return Decision(wanted, reason, _stepped(policy, seen, wanted, memory))


def keeps_warm(window: KeepWarm, at: datetime) -> bool:
    """Whether the weekly window is open at a local time. One that ends before it starts ends on the next day."""
    clock = at.strftime("%H:%M")
    days = window.days or _DAYS
    today, yesterday = _DAYS[at.weekday()], _DAYS[at.weekday() - 1]
    if window.start < window.end:
        return today in days and window.start <= clock < window.end
    return (today in days and clock >= window.start) or (yesterday in days and clock < window.end)


def _remember(seen: ScalingObservation, memory: ScalingMemory) -> ScalingMemory:
    if memory.busy_at is None:
        return ScalingMemory(needs=((seen.now, seen.replicas),) if seen.replicas else (), busy_at=seen.now)
    if seen.requests:
        memory = replace(memory, busy_at=seen.now)
    if memory.asked_at is not None and seen.ready >= seen.replicas:
        took = seen.now - memory.asked_at
        settled = seen.now + min(took, WAKE_SETTLES_S) if memory.woken else memory.settled_at
        memory = replace(
            memory, asked_at=None, woken=False, start_s=took, settled_at=settled, over_since=None
        )
    return memory


def _stepped(
    policy: ScalingPolicy, seen: ScalingObservation, wanted: int, memory: ScalingMemory
) -> ScalingMemory:
    if wanted > seen.replicas:
        patience = memory.patience
        if memory.down_at is not None:
            soon = seen.now - memory.down_at < 2 * policy.downscale_delay_s * patience
            patience = min(2 * patience, MOST_PATIENCE) if soon else 1
        return replace(
            memory,
            needs=((seen.now, wanted),),
            asked_at=seen.now,
            over_since=None,
            ttft_after=seen.now + TTFT_WINDOW_S,
            down_at=None,
            patience=patience,
        )
    if wanted == 0:
        return replace(memory, asked_at=None, woken=False, down_at=None, patience=1)
    return replace(memory, down_at=seen.now) if wanted < seen.replicas else memory


def _least(policy: ScalingPolicy, seen: ScalingObservation, memory: ScalingMemory) -> tuple[int, str]:
    """The bound from below now, or as soon as a replica that is started now answers."""
    least, why = policy.min_replicas, f"at least {policy.min_replicas}"
    if policy.keep_warm:
        moments = [datetime.fromtimestamp(seen.epoch_s + ahead, seen.zone) for ahead in (0.0, memory.start_s)]
        for window in policy.keep_warm:
            if window.min_replicas > least and any(keeps_warm(window, moment) for moment in moments):
                least, why = window.min_replicas, f"kept warm from {window.start} to {window.end}"
    return min(least, policy.max_replicas), why


def _needed(policy: ScalingPolicy, seen: ScalingObservation, memory: ScalingMemory) -> tuple[int, str]:
    """How many the work asks for now, and why. While none answers, no more than those that were asked for."""
    if not seen.ready:
        return min(seen.requests, seen.replicas), _load(seen)
    need = ceil(seen.requests / policy.target_ongoing_requests)
    why = f"{_count(seen.requests, 'request')}, {policy.target_ongoing_requests:g} are meant for one replica"
    if seen.ready < seen.replicas:
        return need, why  # the others may be all that is missing
    for ratio, reason in (
        (
            seen.queue_s / policy.target_queue_s,
            f"queue delay {seen.queue_s:.2g} s, {policy.target_queue_s:g} s are wanted",
        ),
        (
            seen.kv_usage / policy.max_kv_usage,
            f"KV cache {seen.kv_usage:.0%} full, {policy.max_kv_usage:.0%} are wanted",
        ),
        (
            _late(policy, seen, memory),
            f"p95 TTFT {seen.ttft_p95_s:.2g} s, {policy.target_ttft_s:g} s are wanted",
        ),
    ):
        grown = ceil(seen.ready * min(ratio, MOST_GROWTH)) if ratio > 1.0 else 0
        if grown > need:
            need, why = grown, reason
    return need, why


def _late(policy: ScalingPolicy, seen: ScalingObservation, memory: ScalingMemory) -> float:
    if not policy.target_ttft_s or (memory.ttft_after is not None and seen.now < memory.ttft_after):
        return 0.0
    return seen.ttft_p95_s / policy.target_ttft_s


def _comfortable(policy: ScalingPolicy, seen: ScalingObservation) -> int:
    """The fewest that would have the present work with room to spare."""
    if not seen.ready:
        return seen.replicas if seen.requests else 0
    need = max(
        ceil(seen.requests / (policy.target_ongoing_requests * FREE_BELOW)),
        ceil(seen.ready * seen.kv_usage / (policy.max_kv_usage * FREE_BELOW)) if seen.requests else 0,
    )
    late = policy.target_ttft_s and seen.ttft_p95_s > policy.target_ttft_s * FREE_BELOW
    if late or seen.queue_s > policy.target_queue_s * FREE_BELOW:
        need = max(need, seen.replicas)
    return min(need, seen.replicas)


def _settled(seen: ScalingObservation, memory: ScalingMemory) -> bool:
    return memory.settled_at is None or seen.now >= memory.settled_at


def _idle_s(seen: ScalingObservation, memory: ScalingMemory) -> float:
    """As the gateways say, but no longer than we have watched ourselves."""
    return min(seen.idle_s, seen.now - (seen.now if memory.busy_at is None else memory.busy_at))


def _highest(
    needs: tuple[tuple[float, int], ...], now: float, need: int, window_s: float
) -> tuple[tuple[float, int], ...]:
    """The maxima of a sliding window: what is older, or both earlier and lower than a later one, is forgotten."""
    kept = [(at, count) for at, count in needs if now - at < window_s and count > need]
    return (*kept, (now, need))


def _load(seen: ScalingObservation) -> str:
    return f"{_count(seen.requests, 'request')} on {_count(seen.ready, 'replica')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
