"""The tables that routing gets, from what the fleet knows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from toque.fleet.reconcile import Refusal
from toque.fleet.rollout import Wanted
from toque.fleet.store import DeploymentRow, ReplicaRow
from toque.routing.base import ReplicaEntry, ReplicaState, RoutingTable


def table_of(
    row: DeploymentRow, wanted: Wanted, replicas: Sequence[ReplicaRow], refusal: Refusal | None
) -> RoutingTable:
    """``replicas`` are this deployment's. Those that were never started are not in the table."""
    entries = tuple(
        ReplicaEntry(
            replica.id,
            replica.epoch,
            replica.address,
            ReplicaState.DRAINING if replica.gone else replica.state,
            replica.reason,
            replica.revision,
        )
        for replica in replicas
        if replica.epoch
    )
    serving = any(not replica.gone for replica in replicas)
    off = row.stopped or row.deleted
    shares = {} if off else dict(wanted.shares)
    keys = {entry.version for entry in entries} | set(shares) | set(wanted.leaving)
    never = refusal is not None and refusal.never
    return RoutingTable(
        row.name,
        entries if not (off or never) or serving else (*entries, _dead(row, refusal)),
        {revision.key: revision.served() for revision in row.revisions if revision.key in keys},
        shares,
        held=wanted.held and not off,
        # Also what found no room is started by an arrival, if others can be put to sleep for it.
        asleep=not (off or never or serving or wanted.held) and (row.target == 0 or refusal is not None),
        policy=row.spec.routing,
        tool_parser=row.spec.tool_parser,
        reason=refusal.reason if refusal is not None else "" if serving and not off else row.reason,
        leaving=wanted.leaving,
    )


def _dead(row: DeploymentRow, refusal: Refusal | None) -> ReplicaEntry:
    """Stands for what will not come, so that nobody waits for it."""
    reason = refusal.reason if refusal is not None else row.reason
    return ReplicaEntry(f"{row.name}-none", 0, "", ReplicaState.DEAD, reason, row.current)
