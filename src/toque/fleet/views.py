"""The fleet as people and programs are shown it: plain values, made from the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from toque.fleet.rollout import HOLDING, Phase, Rollout
from toque.fleet.spec import DeploymentSpec
from toque.fleet.store import DeploymentRow, Proposal, ReplicaRow
from toque.routing.base import ReplicaState, RoutingTable


class ReplicaView(Struct, frozen=True):
    """Times are seconds since the epoch, 0.0 where it has not come to that; ``version`` is its label."""

    id: str
    deployment: str
    version: str
    epoch: int
    state: str  # a ReplicaState
    reason: str
    address: str
    handle: str  # the process id, for local replicas
    started_at: float
    ready_at: float
    restarts: int
    memory_mb: int


class RolloutView(Struct, frozen=True):
    """``share``: of new requests that go to the new version. ``steps``: a canary's shares, ``step`` the present one's
    index. ``reason``: what it waits for, or why it went back. Times: seconds since the epoch."""

    deployment: str
    number: int
    strategy: str
    phase: str  # a rollout.Phase: done and returned are the ends
    old: str  # labels
    new: str
    share: float
    step: int
    steps: tuple[float, ...]
    paused: bool
    held: bool
    reason: str
    replicas: dict[str, int]  # ready ones by label
    started_at: float
    finished_at: float

    @property
    def running(self) -> bool:
        return self.phase not in (Phase.DONE, Phase.RETURNED)


class DeploymentView(Struct, frozen=True):
    """``status``: ready, starting, asleep, stopped, rolling out, deleting, or failed; ``reason`` says why.
    ``proposed``: the alias that is deployed has moved, and nobody has begun the rollout yet."""

    name: str
    status: str
    reason: str
    version: str  # the label of the current revision
    digest: str
    spec: DeploymentSpec
    generation: int
    observed_generation: int
    target: int  # replicas wanted
    ready: int
    replicas: int
    shares: dict[str, float]  # by label
    rollout: RolloutView | None
    used_at: float
    proposed: Proposal | None = None


def replica_view(row: ReplicaRow, deployment: DeploymentRow | None) -> ReplicaView:
    return ReplicaView(
        id=row.id,
        deployment=row.deployment,
        version=_label(deployment, row.revision),
        epoch=row.epoch,
        state=row.state.value,
        reason=row.reason,
        address=row.address,
        handle=row.handle,
        started_at=row.started_at,
        ready_at=row.ready_at,
        restarts=row.restarts,
        memory_mb=row.memory_mb,
    )


def rollout_view(
    row: DeploymentRow, rollout: Rollout, replicas: Iterable[ReplicaRow], table: RoutingTable | None
) -> RolloutView:
    ready = {_label(row, key): 0 for key in (rollout.old, rollout.new)}
    for replica in replicas:
        if replica.state is ReplicaState.READY and replica.revision in (rollout.old, rollout.new):
            ready[_label(row, replica.revision)] += 1
    share = 1.0 if rollout.phase is Phase.DONE else 0.0
    if rollout.running and table is not None:
        share = table.shares.get(rollout.new, 0.0)
    return RolloutView(
        deployment=row.name,
        number=rollout.number,
        strategy=rollout.policy.strategy,
        phase=rollout.phase.value,
        old=_label(row, rollout.old),
        new=_label(row, rollout.new),
        share=share,
        step=rollout.step,
        steps=rollout.policy.steps if rollout.policy.strategy == "canary" else (),
        paused=rollout.paused,
        held=table.held if table is not None else rollout.phase in HOLDING,
        reason=rollout.reason,
        replicas=ready,
        started_at=rollout.started_at,
        finished_at=rollout.finished_at,
    )


def deployment_view(
    row: DeploymentRow, replicas: Iterable[ReplicaRow], table: RoutingTable | None
) -> DeploymentView:
    own = [replica for replica in replicas if replica.deployment == row.name]
    ready = sum(replica.state is ReplicaState.READY for replica in own)
    shares: Mapping[str, float] = table.shares if table is not None else {}
    status, reason = _status(row, own, ready, table)
    current = row.revision(row.current)
    return DeploymentView(
        name=row.name,
        status=status,
        reason=reason,
        version=current.label,
        digest=current.digest,
        spec=row.spec,
        generation=row.generation,
        observed_generation=row.observed_generation,
        target=row.target,
        ready=ready,
        replicas=len(own),
        shares={_label(row, key): share for key, share in shares.items()},
        rollout=None if row.rollout is None else rollout_view(row, row.rollout, own, table),
        used_at=row.used_at,
        proposed=row.proposed,
    )


def _status(
    row: DeploymentRow, own: list[ReplicaRow], ready: int, table: RoutingTable | None
) -> tuple[str, str]:
    if row.deleted:
        return "deleting", "its replicas finish what they have"
    if row.stopped:
        return "stopped", "by request"
    if row.rollout is not None and row.rollout.running:
        refused = table is not None and table.reason  # there is no room for what comes next
        return "rolling out", str(refused or row.rollout.reason)
    if ready:
        return "ready", row.reason
    if table is not None and table.asleep:
        return "asleep", table.reason
    dead = table.entries if table is not None else ()
    failed = next((entry.reason for entry in dead if entry.state is ReplicaState.DEAD), "")
    if failed:
        return "failed", failed
    return "starting", next((replica.reason for replica in own if replica.reason), row.reason)


def _label(deployment: DeploymentRow | None, key: str) -> str:
    if deployment is not None:
        for revision in deployment.revisions:
            if revision.key == key:
                return revision.label or key
    return key
