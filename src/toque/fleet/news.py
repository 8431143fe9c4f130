"""What changed from one round of the controller to the next, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toque.fleet.reconcile import REFUSED
from toque.fleet.store import DeploymentRow, ReplicaRow
from toque.routing.base import ReplicaState


def of_deployments(before: Mapping[str, DeploymentRow], after: Mapping[str, DeploymentRow]) -> Iterator[str]:
    for name, row in after.items():
        old = before.get(name)
        if old is None:
            continue
        if row.reason.startswith(REFUSED):
            if not old.reason.startswith(REFUSED):
                yield f"{name}: {row.reason}"
        elif row.target != old.target and old.observed_generation:  # not when it was just deployed
            yield f"{name}: {row.target} replicas instead of {old.target}: {row.reason}"
        rollout, earlier = row.rollout, old.rollout
        if rollout is not None and earlier is not None and rollout.phase != earlier.phase:
            label = {revision.key: revision.label or revision.key for revision in row.revisions}
            way = f"{label.get(rollout.old, rollout.old)} to {label.get(rollout.new, rollout.new)}"
            yield f"{name}: rollout {way}: {rollout.phase}" + (
                f": {rollout.reason}" if rollout.reason else ""
            )
    for name in before:
        if name not in after:
            yield f"{name}: deleted"


def of_replicas(before: Mapping[str, ReplicaRow], after: Mapping[str, ReplicaRow]) -> Iterator[str]:
    """Starts and readiness are told by the replicas themselves, what one is started for where that is unusual."""
    for replica_id, row in after.items():
        old = before.get(replica_id)
        if row.reason if old is None else row.restarts > old.restarts:
            yield f"replica {replica_id} {row.reason}"
        elif old is not None and row.state is ReplicaState.DEGRADED and old.state is not row.state:
            yield f"replica {replica_id} is degraded: {row.reason}"
