"""One replica's row, as its process comes and goes. Pure: what was seen goes in, the next row comes out."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from toque.fleet.health import Health
from toque.fleet.placement.base import Observed
from toque.fleet.restart import MAX_DELAY_S, RestartPolicy
from toque.fleet.store import ReplicaRow
from toque.routing.base import ReplicaState

_TALKS = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DEGRADED)


class Ending(Struct, frozen=True):
    """How a process ended, or why it has to. ``kill``: it is still there."""

    reason: str
    status: int | None = None
    kill: bool = False


def exists(row: ReplicaRow) -> bool:
    """Whether the row stands for a process that was started and has not been seen to end."""
    return row.started_at > 0.0


def due(row: ReplicaRow, now: float) -> bool:
    """Whether it is to be started now. A wall clock that was set back makes nobody wait."""
    return not row.gone and not exists(row) and not now < row.retry_at <= now + MAX_DELAY_S


def ending(row: ReplicaRow, observed: Observed | None, hang: str) -> Ending | None:
    """None while the process lives. ``observed`` is what the placement lists under the row's id and epoch."""
    if observed is None:
        return Ending("it is gone")
    if observed.exit_status is not None:
        return Ending(observed.last_error or "it ended", observed.exit_status)
    return Ending(hang, kill=True) if hang else None


def seen(row: ReplicaRow, observed: Observed, health: Health | None, now: float) -> ReplicaRow:
    """The row of a process that lives."""
    if row.handle != observed.handle:
        row = replace(row, handle=observed.handle)
    if row.gone:
        return row if row.state is ReplicaState.DRAINING else replace(row, state=ReplicaState.DRAINING)
    if health is None or health.state is ReplicaState.DEAD:
        return row  # its end, or its loss, will be seen
    if health.state not in _TALKS:
        return replace(row, state=health.state, reason=health.reason) if health.state != row.state else row
    if health.state is ReplicaState.READY and not row.ready_at:
        row = replace(row, ready_at=now)
    reason = "" if health.state is ReplicaState.READY else row.reason
    if health.state is ReplicaState.DEGRADED:
        reason = (
            "no step finishes, or nothing is heard"  # without a figure: the row is written when it changes
        )
    if (row.state, row.reason) != (health.state, reason):
        row = replace(row, state=health.state, reason=reason)
    return row


def ended(
    row: ReplicaRow, end: Ending, policy: RestartPolicy, *, ready_s: float | None, now: float
) -> ReplicaRow:
    """The row of a process that ended and is to be replaced. It keeps its epoch until it is started again."""
    restart = policy.ended(ready_s=ready_s, status=end.status)
    reason = f"restarted after: {end.reason}"
    if restart.hopeless:
        reason = end.reason
    elif restart.delay_s:
        reason += f", in {restart.delay_s:g} s"
    return replace(
        row,
        state=ReplicaState.DEAD if restart.hopeless else ReplicaState.STARTING,
        reason=reason,
        handle="",
        started_at=0.0,
        ready_at=0.0,
        retry_at=now + restart.delay_s,
        restarts=row.restarts + 1,
    )


def started(row: ReplicaRow, epoch: int, address: str, now: float) -> ReplicaRow:
    """A row that failed for good shows so until its next process is ready."""
    return replace(
        row,
        epoch=epoch,
        address=address,
        handle="",
        state=row.state if row.state is ReplicaState.DEAD else ReplicaState.STARTING,
        started_at=now,
        ready_at=0.0,
        retry_at=0.0,
    )
