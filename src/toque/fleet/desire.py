"""One deployment's next row: how many replicas it shall have, and where its rollout goes on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from toque.fleet import rollout as rollouts
from toque.fleet.autoscaler import ScalingMemory, ScalingObservation, decide
from toque.fleet.health import Health
from toque.fleet.revisions import offered
from toque.fleet.rollout import Phase, RevisionView, Wanted
from toque.fleet.signals import Demand
from toque.fleet.store import DeploymentRow, ReplicaRow
from toque.routing.base import ReplicaState, VersionOutcomes

STOPPED = "stopped by request"


class Seen(Struct, frozen=True):
    """What there is of one deployment. ``health`` by replica id, ``outcomes`` by revision; ``tokens_per_second``:
    what one replica does while it computes; ``room_mb``: what of the machine's memory nobody has; ``replaced``:
    revisions on their way out that get a replica for requests that have lost theirs."""

    replicas: Sequence[ReplicaRow]
    health: Mapping[str, Health]
    demand: Demand = Demand()
    outcomes: Mapping[str, VersionOutcomes] = {}
    tokens_per_second: float = 0.0
    room_mb: int = 1 << 30
    replaced: Collection[str] = ()

    @property
    def at_work(self) -> bool:
        """A request is at a gateway or at a replica."""
        inside = any(h.stats.running or h.stats.waiting for h in self.health.values())
        return self.demand.requests > 0 or inside


def scaled(
    row: DeploymentRow, seen: Seen, memory: ScalingMemory, *, monotonic: float, now: float
) -> tuple[DeploymentRow, ScalingMemory]:
    """The row with its target and the reason for it."""
    if row.stopped or row.deleted:
        return _aim(row, 0, STOPPED if row.stopped else "deleted"), memory
    answering = [r for r in seen.replicas if not r.gone and r.state is ReplicaState.READY]
    stats = [seen.health[r.id].stats for r in answering if r.id in seen.health]
    need = row.revision(row.current).memory_mb
    own = sum(not r.gone for r in seen.replicas)
    idle = seen.demand.idle_s
    decision = decide(
        row.spec.scaling,
        ScalingObservation(
            now=monotonic,
            epoch_s=now,
            replicas=row.target,
            ready=len(answering),
            waiting=seen.demand.waiting,
            waiting_s=seen.demand.waiting_s,
            running=sum(each.running for each in stats),
            queued=sum(each.waiting for each in stats),
            queued_tokens=sum(each.queued_tokens for each in stats),
            tokens_per_second=seen.tokens_per_second,
            kv_usage=sum(s.kv_blocks_used / s.kv_blocks_total for s in stats if s.kv_blocks_total)
            / max(1, len(stats)),
            ttft_p95_s=seen.demand.ttft_p95_s,
            idle_s=0.0 if seen.at_work else max(0.0, now - row.used_at) if idle is None else idle,
            max_possible=max(1, own + max(0, seen.room_mb) // max(1, need)),
        ),
        memory,
    )
    target = decision.replicas
    if target == 0 and row.target and seen.at_work:
        target = 1  # the last word: nothing is put to sleep while it works
    if target == row.target and row.reason not in ("", STOPPED):
        return row, decision.memory  # its figures change all the time, and are not worth a write
    return _aim(row, target, decision.reason), decision.memory


def rolled(row: DeploymentRow, seen: Seen, now: float) -> tuple[DeploymentRow, Wanted]:
    """The row with its rollout carried on, and what is wanted of each revision now."""
    if row.stopped or row.deleted:
        if row.rollout is not None and row.rollout.running:  # a deployment that is deleted meanwhile
            row = replace(row, rollout=replace(row.rollout, phase=Phase.RETURNED, finished_at=now))
        return row, Wanted({}, {})
    rollout = row.rollout
    if rollout is None or not rollout.running:
        return row, Wanted({row.current: row.target}, {row.current: 1.0})
    old, new = _view(seen, rollout.old), _view(seen, rollout.new)
    need = row.revision(rollout.new).memory_mb
    after = rollouts.advance(rollout, row.target, old, new, now, room_for_two=need <= seen.room_mb)
    wanted = rollouts.wanted(after, row.target, old, new)
    if after is rollout or after == rollout:
        return row, wanted
    row = replace(row, rollout=after)
    if after.phase is Phase.DONE:
        row = replace(row, current=after.new, previous=after.old)
    elif after.phase is Phase.RETURNED:
        back = row.revision(after.old)
        row = replace(row, spec=replace(row.spec, model=back.reference, engine=back.engine))
    if not after.running:
        # What was proposed meanwhile may be what runs again, or be of a reference that is not followed any more.
        known = row.proposed
        row = offered(row, known if known is not None and known.reference == row.spec.model else None)
        wanted = Wanted({row.current: row.target}, {row.current: 1.0})
    return row, wanted


def _aim(row: DeploymentRow, target: int, reason: str) -> DeploymentRow:
    return row if (row.target, row.reason) == (target, reason) else replace(row, target=target, reason=reason)


def _view(seen: Seen, key: str) -> RevisionView:
    rows = [row for row in seen.replicas if row.revision == key]
    return RevisionView(
        ready=sum(row.state is ReplicaState.READY and not row.gone for row in rows),
        processes=max(len(rows), key in seen.replaced),
        draining=sum(row.gone for row in rows),
        failed=next((row.reason for row in rows if row.state is ReplicaState.DEAD), ""),
        outcomes=seen.outcomes.get(key, VersionOutcomes()),
    )
