"""What does not work as it should although requests are answered, with the reason, for `/health`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toque.routing.base import ReplicaState
from toque.routing.pool import ReplicaPool

if TYPE_CHECKING:
    from toque.gateway.gateway import Gateway


def degradations(gateway: Gateway) -> Iterator[tuple[str, str]]:
    """``(part, reason)``; nothing where all is well. A replica that starts for the first time is no trouble."""
    for name, deployment in gateway.deployments.items():
        if not isinstance(deployment.client, ReplicaPool):
            continue
        conditions = deployment.client.replica_conditions()
        for replica, (state, reason) in conditions.items():
            if state in (ReplicaState.DEGRADED, ReplicaState.DEAD) or reason.startswith("restarting"):
                yield f"{name}/{replica}", reason or state.value
    if gateway.ledger is not None:
        status = gateway.ledger.status()
        if status.state != "ok":
            yield "ledger", f"{status.state}: {status.reason}"
        elif status.rejected:
            yield "ledger", f"{status.rejected} rows were refused by its database and put aside"
