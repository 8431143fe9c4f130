"""/health: what is amiss although requests are answered, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toque.gateway.condition import degradations
from toque.monitor.ledger.ledger import Ledger
from toque.routing.base import ReplicaState
from toque.routing.pool import ReplicaPool

from .world import soon, world


async def test_a_ledger_that_waits_for_its_database_degrades_but_does_not_stop(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database, and longer than a hundred bytes" * 10)
    ledger = Ledger(tmp_path, apply_s=0.02)
    async with world() as w:
        assert (await w.client.get("/health")).json()["status"] == "ok"
        w.gateway.ledger = ledger
        ledger.start()
        await soon(lambda: ledger.status().state == "buffering")
        answer = await w.client.get("/health")
        assert answer.status_code == 200
        told = answer.json()
        assert told["status"] == "degraded"
        assert told["degraded"][0]["part"] == "ledger"
        assert "buffering" in told["degraded"][0]["reason"]
        assert (await w.client.get("/ready")).status_code == 200
    ledger.close(0.2)


class Pool(ReplicaPool):
    """A pool whose replicas are as they are told to be."""

    def __init__(self, conditions: dict[str, tuple[ReplicaState, str]]) -> None:
        super().__init__("m")
        self._conditions = conditions

    def replica_conditions(self) -> dict[str, tuple[ReplicaState, str]]:
        return self._conditions


async def test_replicas_that_are_not_well_are_named_and_those_that_begin_are_not() -> None:
    pool = Pool(
        {
            "m-0": (ReplicaState.READY, ""),
            "m-1": (ReplicaState.STARTING, "loading the model"),
            "m-2": (ReplicaState.STARTING, "restarting: it was killed by signal 9"),
            "m-3": (ReplicaState.DEGRADED, "no step finished for 4 s"),
            "m-4": (ReplicaState.DEAD, ""),
        }
    )
    gateway: Any = SimpleNamespace(deployments={"m": SimpleNamespace(client=pool)}, ledger=None)
    assert list(degradations(gateway)) == [
        ("m/m-2", "restarting: it was killed by signal 9"),
        ("m/m-3", "no step finished for 4 s"),
        ("m/m-4", "dead"),
    ]
