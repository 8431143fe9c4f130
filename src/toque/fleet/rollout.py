"""How a new revision of a deployment takes over from the old one: a state, and a pure function that carries it on.

::

    surge   shifting ─────────────────────────────▶ done      one more replica of the new revision, ready, then one
               │                                              less of the old one, until there is none
    canary  testing ─▶ … ─▶ testing ─▶ shifting ──▶ done      a step's share of the requests, judged, then the next
               │                          │
               └──────────┬───────────────┘
                          ▼
                      returning ──────────────────▶ returned  the same way back; the reason says why

    swap    emptying ─▶ loading ──────────────────▶ done      arrivals held, the old one finishes and goes, the new one
               │           │                                  comes, arrivals released
               └─────┬─────┘
                     ▼
                 restoring ───────────────────────▶ returned

Guarantees, for any order of observations: the shares sum to 1; outside a swap no replica is asked to stop unless as
many as are wanted are ready without it (but on the way back not for longer than ``ready_timeout_s``); at most
``max_surge`` processes more than wanted exist; whatever was begun ends in done or returned once its replicas come up,
and after `undo` only in returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from toque.errors import ConflictError
from toque.fleet.outcomes import difference, judge
from toque.fleet.spec import RolloutPolicy
from toque.routing.base import VersionOutcomes


class Phase(StrEnum):
    PENDING = "pending"
    SHIFTING = "shifting"
    TESTING = "testing"
    EMPTYING = "emptying"
    LOADING = "loading"
    RETURNING = "returning"
    RESTORING = "restoring"
    DONE = "done"
    RETURNED = "returned"


ENDED = frozenset({Phase.DONE, Phase.RETURNED})
HOLDING = frozenset({Phase.EMPTYING, Phase.LOADING, Phase.RESTORING})


class Rollout(Struct, frozen=True):
    """One rollout, as it is remembered. ``old`` and ``new`` are keys of revisions; times are seconds since the epoch.

    ``new_replicas`` is how many of the new revision were last wanted (while paused it stays), ``new_ready`` how many
    were ready then, and ``lacking_since`` when it last came nearer to that (0.0: nothing lacks).
    """

    number: int
    old: str
    new: str
    policy: RolloutPolicy
    phase: Phase
    started_at: float
    since: float  # when this phase or step began
    step: int = 0
    paused: bool = False
    new_replicas: int = 0
    new_ready: int = 0
    lacking_since: float = 0.0
    reason: str = ""
    finished_at: float = 0.0
    base_old: VersionOutcomes = VersionOutcomes()  # as they were when the step began
    base_new: VersionOutcomes = VersionOutcomes()

    @property
    def running(self) -> bool:
        return self.phase not in ENDED


class RevisionView(Struct, frozen=True):
    """A revision's replicas. ``processes`` counts every one that exists, draining ones too; ``failed`` says why none
    of them will ever be ready, where that is known."""

    ready: int = 0
    processes: int = 0
    draining: int = 0
    failed: str = ""
    outcomes: VersionOutcomes = VersionOutcomes()


class Wanted(Struct, frozen=True):
    """What a rollout asks for: replicas and shares by revision, and whether arrivals are held. ``leaving``: revisions
    that finish what they have."""

    replicas: Mapping[str, int]
    shares: Mapping[str, float]
    held: bool = False
    leaving: tuple[str, ...] = ()


def begin(number: int, old: str, new: str, policy: RolloutPolicy, now: float) -> Rollout:
    return Rollout(number, old, new, policy, Phase.PENDING, now, now)


def advance(
    rollout: Rollout,
    target: int,
    old: RevisionView,
    new: RevisionView,
    now: float,
    *,
    room_for_two: bool = True,
) -> Rollout:
    """The rollout's next state. ``target``: replicas that the deployment shall have; of the new revision at least one
    is started, even where that is none. ``room_for_two``: a replica more than there are fits into memory; it decides
    what ``auto`` is."""
    if not rollout.running:
        return rollout
    if rollout.phase is Phase.PENDING:
        rollout = _start(rollout, now, room_for_two)
    rollout = _progress(rollout, new, now)
    least = target
    target = max(target, 1)
    if rollout.phase is Phase.SHIFTING:
        state = _shift(rollout, target, old, new, now)
    elif rollout.phase is Phase.TESTING:
        state = _test(rollout, target, old, new, now)
    elif rollout.phase is Phase.EMPTYING:
        state = _enter(rollout, Phase.LOADING, now) if not old.processes else rollout
    elif rollout.phase is Phase.LOADING:
        state = _load(rollout, target, new, now)
    elif new.processes == 0 and old.ready >= (min(least, 1) if rollout.phase is Phase.RESTORING else least):
        state = _end(rollout, Phase.RETURNED, now, rollout.reason)
    else:
        state = rollout
    return replace(state, new_replicas=_new_replicas(state, least, old, new, now))


def wanted(rollout: Rollout, target: int, old: RevisionView, new: RevisionView) -> Wanted:
    """What to have now. For an ended rollout: of the revision that it ended with."""
    if not rollout.running:
        last = rollout.new if rollout.phase is Phase.DONE else rollout.old
        other = rollout.old if rollout.phase is Phase.DONE else rollout.new
        return Wanted({last: target, other: 0}, {last: 1.0})
    n_new = rollout.new_replicas
    if rollout.phase in (Phase.EMPTYING, Phase.LOADING):
        n_old = 0
    elif rollout.phase is Phase.RESTORING:
        n_old = target if not new.processes else 0
    elif rollout.phase is Phase.RETURNING:
        # As many processes as allowed: what cannot go yet on the new side makes less room on the old one.
        room = target + rollout.policy.max_surge - new.processes
        n_old = min(target, max(room - old.draining, old.processes - old.draining, 0))
    else:
        n_old = max(0, target - new.ready)
        if rollout.phase is Phase.TESTING:
            n_old = max(n_old, target - _canaries(rollout, target), 1)  # to compare it with
        # What is lost on the new side comes back on the old one only as far as there is room.
        room = target + rollout.policy.max_surge - max(new.processes, n_new + new.draining) - old.draining
        n_old = min(n_old, max(old.processes - old.draining, room, 0))
    share = _share(rollout, old, new, n_old)
    shares = {rollout.new: share, rollout.old: 1.0 - share}
    return Wanted(
        {rollout.old: n_old, rollout.new: n_new},
        {key: value for key, value in shares.items() if value > 0.0},
        _held(rollout, old, new),
    )


def share_of_step(rollout: Rollout) -> float:
    return rollout.policy.steps[rollout.step]


def pause(rollout: Rollout) -> Rollout:
    """Stays as it is until `resume`; failures still return it. ConflictError where arrivals are held."""
    _check_running(rollout)
    if rollout.phase not in (Phase.SHIFTING, Phase.TESTING):
        raise ConflictError(
            f"the rollout is {rollout.phase}: it cannot pause "
            + ("while arrivals are held" if rollout.phase in HOLDING else "on its way back")
        )
    return replace(rollout, paused=True, reason="paused")


def resume(rollout: Rollout, now: float) -> Rollout:
    _check_running(rollout)
    if not rollout.paused:
        raise ConflictError("the rollout is not paused")
    return replace(rollout, paused=False, since=now, reason="")


def promote(rollout: Rollout, now: float) -> Rollout:
    """To all requests without further tests."""
    _check_running(rollout)
    if rollout.phase is Phase.TESTING:
        return replace(_enter(rollout, Phase.SHIFTING, now, "promoted"), paused=False)
    if rollout.phase is Phase.SHIFTING:
        return replace(rollout, paused=False, since=now, reason="promoted")
    raise ConflictError(f"the rollout is {rollout.phase}: there is nothing to promote")


def undo(rollout: Rollout, now: float, reason: str = "undone by request") -> Rollout:
    """Back to the old revision."""
    _check_running(rollout)
    if rollout.phase in (Phase.RETURNING, Phase.RESTORING):
        return rollout
    back = Phase.RESTORING if rollout.policy.strategy == "swap" else Phase.RETURNING
    return replace(_enter(rollout, back, now, reason), paused=False)


def _check_running(rollout: Rollout) -> None:
    if not rollout.running:
        raise ConflictError(f"the rollout is over ({rollout.phase})")


def _start(rollout: Rollout, now: float, room_for_two: bool) -> Rollout:
    policy = rollout.policy
    if policy.strategy == "auto":
        policy = replace(policy, strategy="surge" if room_for_two else "swap")
    phase = {"surge": Phase.SHIFTING, "canary": Phase.TESTING, "swap": Phase.EMPTYING}[policy.strategy]
    if phase is Phase.TESTING and not policy.steps:
        phase = Phase.SHIFTING
    return replace(rollout, policy=policy, phase=phase, since=now)


def _shift(rollout: Rollout, target: int, old: RevisionView, new: RevisionView, now: float) -> Rollout:
    late = _late(rollout, new, now)
    if late:
        return undo(rollout, now, late)
    if new.ready >= target and not old.processes:
        return _end(rollout, Phase.DONE, now, "")
    return rollout


def _test(rollout: Rollout, target: int, old: RevisionView, new: RevisionView, now: float) -> Rollout:
    late = _late(rollout, new, now)
    if late:
        return undo(rollout, now, late)
    if new.ready < 1:
        # The step's time and its counts begin when there is something to send requests to.
        waiting = replace(rollout, base_old=old.outcomes, base_new=new.outcomes)
        return waiting if rollout.paused else replace(waiting, reason="the new version is loading")
    if rollout.reason == "the new version is loading":
        rollout = replace(rollout, since=now, reason="")
    seen_old = difference(old.outcomes, rollout.base_old)
    seen_new = difference(new.outcomes, rollout.base_new)
    verdict = judge(seen_old, seen_new, old.outcomes, rollout.policy)
    if verdict.bad:
        return undo(rollout, now, verdict.bad)
    if rollout.paused:
        return rollout
    lasted = now - rollout.since
    if not verdict.enough or lasted < rollout.policy.step_s or new.ready < _canaries(rollout, target):
        share = f"{share_of_step(rollout):.0%} of the requests"
        return replace(
            rollout,
            reason=f"{share}: {verdict.progress}, {min(lasted, rollout.policy.step_s):.0f} of "
            f"{rollout.policy.step_s:g} s",
        )
    if rollout.step + 1 < len(rollout.policy.steps):
        rollout = replace(rollout, step=rollout.step + 1, base_old=old.outcomes, base_new=new.outcomes)
        return replace(rollout, since=now, reason=f"{share_of_step(rollout):.0%} of the requests")
    return _enter(rollout, Phase.SHIFTING, now, "all tests passed")


def _load(rollout: Rollout, target: int, new: RevisionView, now: float) -> Rollout:
    late = _late(rollout, new, now)
    if late and not new.ready:
        return undo(rollout, now, late)
    return _end(rollout, Phase.DONE, now, "") if new.ready >= target or (late and new.ready) else rollout


def _progress(rollout: Rollout, new: RevisionView, now: float) -> Rollout:
    lacking = rollout.lacking_since
    if new.ready >= rollout.new_replicas:
        lacking = 0.0
    elif new.ready > rollout.new_ready or not lacking:
        lacking = now
    if (lacking, new.ready) == (rollout.lacking_since, rollout.new_ready):
        return rollout
    return replace(rollout, lacking_since=lacking, new_ready=new.ready)


def _late(rollout: Rollout, new: RevisionView, now: float) -> str:
    if new.failed:
        return f"the new version does not start: {new.failed}"
    if rollout.lacking_since and now - rollout.lacking_since > rollout.policy.ready_timeout_s:
        return f"the new version was not ready after {rollout.policy.ready_timeout_s:g} s"
    return ""


def _new_replicas(rollout: Rollout, target: int, old: RevisionView, new: RevisionView, now: float) -> int:
    phase, before = rollout.phase, rollout.new_replicas
    if phase in (Phase.PENDING, Phase.EMPTYING, Phase.RESTORING, Phase.RETURNED):
        return 0
    if phase is Phase.RETURNING:
        # What keeps the old ones from coming back may be the room that the new ones have.
        overdue = now - rollout.since > rollout.policy.ready_timeout_s
        return 0 if overdue else min(before, max(0, target - old.ready))
    target = max(target, 1)
    if phase in (Phase.LOADING, Phase.DONE):
        return target
    if rollout.paused:
        return min(before, target)
    room = target + rollout.policy.max_surge - old.processes - new.draining
    most = target if phase is Phase.SHIFTING else _canaries(rollout, target)
    return min(most, max(before, room))


def _canaries(rollout: Rollout, target: int) -> int:
    return max(1, ceil(share_of_step(rollout) * target - 1e-9))


def _share(rollout: Rollout, old: RevisionView, new: RevisionView, n_old: int) -> float:
    """Of the new revision. ``n_old``: old ones that stay; those that go take nothing any more."""
    if rollout.phase is Phase.TESTING:
        return share_of_step(rollout) if new.ready else 0.0
    if rollout.phase in (Phase.EMPTYING, Phase.RESTORING):
        return 0.0
    if rollout.phase is Phase.LOADING:
        return 1.0
    if rollout.phase is Phase.RETURNING:
        return 0.0 if old.ready or not new.ready else 1.0
    return new.ready / (new.ready + min(old.ready, n_old)) if new.ready else 0.0


def _held(rollout: Rollout, old: RevisionView, new: RevisionView) -> bool:
    if rollout.phase is Phase.EMPTYING:
        return True
    if rollout.phase is Phase.LOADING:
        return not new.ready
    return rollout.phase is Phase.RESTORING and not old.ready


def _enter(rollout: Rollout, phase: Phase, now: float, reason: str = "") -> Rollout:
    return replace(rollout, phase=phase, since=now, reason=reason)


def _end(rollout: Rollout, phase: Phase, now: float, reason: str) -> Rollout:
    return replace(rollout, phase=phase, since=now, finished_at=now, reason=reason, paused=False)
