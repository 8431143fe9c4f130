"""One round's decision, from everything that was seen. It remembers, but does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from toque.fleet.autoscaler import ScalingMemory
from toque.fleet.desire import Seen, rolled, scaled
from toque.fleet.health import HangBounds, Health, Life
from toque.fleet.leaving import Leaving
from toque.fleet.lifecycle import ended, ending, exists, seen
from toque.fleet.placement.base import Observed
from toque.fleet.reconcile import REFUSED, Desired, Plan, Refusal, Room, plan
from toque.fleet.restart import RestartPolicy
from toque.fleet.revisions import pruned
from toque.fleet.rollout import Wanted
from toque.fleet.routes import table_of
from toque.fleet.service_rate import ServiceRate
from toque.fleet.signals import Signals
from toque.fleet.store import DeploymentRow, ReplicaRow, Reported
from toque.routing.base import ReplicaState, RoutingTable

Key = tuple[str, int]  # replica id and epoch
HealthOf = Callable[[str, int], Health | None]
FINISHES = "finishes requests of a leaving version that have lost their replica"
_USED_WRITE_S = 60.0  # `used_at` is written this often at most


class Decided(Struct, frozen=True):
    """``survivors`` are the rows as they were found, whatever becomes of the decision; ``replicas`` those after it.
    ``start``: whose process is to be started; ``kill``: processes that are to end at once."""

    deployments: dict[str, DeploymentRow]
    dropped: tuple[str, ...]
    survivors: dict[str, ReplicaRow]
    replicas: dict[str, ReplicaRow]
    start: list[str]
    kill: list[Key]
    wanted: dict[str, Wanted]
    refused: dict[str, Refusal]

    def tables(self, replicas: Mapping[str, ReplicaRow]) -> dict[str, RoutingTable]:
        own = _by_deployment(replicas)
        return {
            name: table_of(row, self.wanted[name], own.get(name, []), self.refused.get(name))
            for name, row in self.deployments.items()
        }


class Decider:
    """Remembers what only time tells: lives of processes, restarts, loads, reports. A fresh one, after a restart of
    the controller, judges nobody in a hurry."""

    def __init__(self, bounds: HangBounds) -> None:
        self._bounds = bounds
        self._lives: dict[Key, Life] = {}
        self._policies: dict[str, RestartPolicy] = {}
        self._ended: dict[str, tuple[ReplicaRow, ReplicaRow]] = {}  # by id: the row, and what became of it
        self._scaling: dict[str, ScalingMemory] = {}
        self._rates: dict[str, ServiceRate] = {}
        self._used: dict[str, float] = {}
        self._leaving = Leaving()
        self._signals = Signals()

    def lost(self, replica_id: str, epoch: int, monotonic: float) -> None:
        """A process that was told to finish what it has ended badly, and is not listed any more."""
        self._leaving.lost(replica_id, epoch, monotonic)

    def decide(
        self,
        deployments: Mapping[str, DeploymentRow],
        replicas: Mapping[str, ReplicaRow],
        observed: Mapping[Key, Observed],
        health_of: HealthOf,
        reported: Iterable[Reported],
        *,
        limit_mb: int,
        now: float,
        monotonic: float,
    ) -> Decided:
        """``now`` is the wall clock's, ``monotonic`` never goes back; both in seconds."""
        self._signals.hear(reported, now)
        health: dict[str, Health] = {}
        survivors: dict[str, ReplicaRow] = {}
        for row in replicas.values():
            heard = health_of(row.id, row.epoch) if exists(row) else None
            if heard is not None:
                health[row.id] = heard
            after = self._live(row, observed.get((row.id, row.epoch)), heard, now, monotonic)
            if after is not None:
                survivors[row.id] = after
        kill = [key for key, each in observed.items() if _unwanted(survivors.get(key[0]), each)]
        free = limit_mb - sum(row.memory_mb for row in survivors.values())
        rows: dict[str, DeploymentRow] = {}
        desired: dict[str, Desired] = {}
        own = _by_deployment(survivors)
        for name, deployment in deployments.items():
            rows[name], desired[name] = self._desire(
                deployment, own.get(name, []), health, free, now, monotonic
            )
        todo = plan(desired, list(survivors.values()), Room(limit_mb), now)
        self._settle(rows, todo)
        after_plan = _planned(survivors, rows, desired, todo)
        kept = {row.deployment for row in after_plan.values()}
        dropped = tuple(
            name
            for name, row in rows.items()
            if row.deleted and name not in kept and not desired[name].wanted.replicas
        )
        for name in dropped:
            del rows[name]
        self._forget(rows, after_plan)
        start = [*todo.start, *(replica_id for replica_id in after_plan if replica_id not in survivors)]
        wanted = {name: desired[name].wanted for name in rows}
        return Decided(rows, dropped, survivors, after_plan, start, kill, wanted, todo.refused)

    def _live(
        self,
        row: ReplicaRow,
        observed: Observed | None,
        health: Health | None,
        now: float,
        monotonic: float,
    ) -> ReplicaRow | None:
        """The row after a look at its process; None if both are gone."""
        if not exists(row):
            return None if row.gone else row
        counted = self._ended.get(row.id)
        if counted is not None and counted[0] == row:  # what the last round decided was not stored
            return counted[1]
        life = self._lives.setdefault((row.id, row.epoch), Life(self._bounds))
        hang = life.judge(monotonic, health, loaded=observed is not None and observed.loaded)
        if row.gone:
            if observed is not None:
                if observed.exit_status:
                    self._leaving.lost(row.id, row.epoch, monotonic)
                return seen(row, observed, health, now)
            stranded = self._signals.demand(row.deployment, now).stranded
            return row if self._leaving.mourned(row, stranded, monotonic) else None
        end = ending(row, observed, hang)
        if end is None:
            assert observed is not None
            return seen(row, observed, health, now)
        del self._lives[row.id, row.epoch]
        policy = self._policies.setdefault(row.id, RestartPolicy())
        after = ended(row, end, policy, ready_s=life.ready_s(), now=now)
        self._ended[row.id] = row, after
        return after

    def _desire(
        self,
        row: DeploymentRow,
        own: list[ReplicaRow],
        health: Mapping[str, Health],
        free_mb: int,
        now: float,
        monotonic: float,
    ) -> tuple[DeploymentRow, Desired]:
        heard = {replica.id: health[replica.id] for replica in own if replica.id in health}
        rate = self._rates.setdefault(row.name, ServiceRate())
        rate.observe({(r.id, r.epoch): heard[r.id].stats for r in own if r.id in heard})
        demand = self._signals.demand(row.name, now)
        what = Seen(
            own,
            heard,
            demand,
            {revision.key: self._signals.outcomes(row.name, revision.key) for revision in row.revisions},
            rate.per_second,
            free_mb,
            self._leaving.replaced(row.name, demand.stranded, monotonic),
        )
        used = max(self._used.get(row.name, 0.0), row.used_at)
        if what.at_work:
            used = now
        elif demand.idle_s is not None:
            used = max(used, now - demand.idle_s)
        self._used[row.name] = used
        if used - row.used_at > _USED_WRITE_S:
            row = replace(row, used_at=used)
        memory = self._scaling.get(row.name, ScalingMemory())
        row, self._scaling[row.name] = scaled(row, what, memory, monotonic=monotonic, now=now)
        row, wanted = rolled(row, what, now)
        running = {replica.revision for replica in own}
        wanted = self._leaving.completed(row, wanted, running, demand.stranded, monotonic)
        row = pruned(row, {*running, *wanted.leaving})
        if row.observed_generation != row.generation:
            row = replace(row, observed_generation=row.generation)
        serving = any(replica.state is ReplicaState.READY and not replica.gone for replica in own)
        waiting_s = demand.waiting_s if demand.waiting and not serving else None
        return row, Desired(row, wanted, waiting_s, not what.at_work, used)

    def _settle(self, rows: dict[str, DeploymentRow], todo: Plan) -> None:
        """What the plan means for the deployments themselves."""
        for name, reason in todo.evicted.items():
            rows[name] = replace(rows[name], target=0, reason=reason)
            self._scaling.pop(name, None)
        for name, row in rows.items():
            refusal = todo.refused.get(name)
            if refusal is not None and row.reason != refusal.reason:
                rows[name] = replace(row, reason=refusal.reason)
            elif refusal is None and row.reason.startswith(REFUSED):
                rows[name] = replace(row, reason="")  # the next round says why there are so many

    def _forget(self, rows: Mapping[str, DeploymentRow], replicas: Mapping[str, ReplicaRow]) -> None:
        known = {(row.id, row.epoch) for row in replicas.values()}
        self._lives = {key: life for key, life in self._lives.items() if key in known}
        self._policies = {key: policy for key, policy in self._policies.items() if key in replicas}
        self._ended = {key: counted for key, counted in self._ended.items() if key in replicas}
        for memory in (self._scaling, self._rates, self._used):
            for name in [name for name in memory if name not in rows]:
                del memory[name]
        self._leaving.forget(rows, replicas)
        self._signals.forget({name: [r.key for r in row.revisions] for name, row in rows.items()})


def _by_deployment(replicas: Mapping[str, ReplicaRow]) -> dict[str, list[ReplicaRow]]:
    grouped: dict[str, list[ReplicaRow]] = {}
    for row in replicas.values():
        grouped.setdefault(row.deployment, []).append(row)
    return grouped


def _unwanted(row: ReplicaRow | None, observed: Observed) -> bool:
    """Whether a process is nobody's, or has ended and is to be listed no more."""
    if row is None or row.epoch != observed.epoch or not exists(row):
        return True
    return row.gone and observed.exit_status is not None


def _planned(
    survivors: Mapping[str, ReplicaRow],
    rows: Mapping[str, DeploymentRow],
    desired: Mapping[str, Desired],
    todo: Plan,
) -> dict[str, ReplicaRow]:
    after = dict(survivors)
    for replica_id in todo.stop:
        row = after[replica_id]
        if exists(row):
            after[replica_id] = replace(
                row, gone=True, state=ReplicaState.DRAINING, reason="not wanted any more"
            )
        else:
            del after[replica_id]
    for name, key in todo.add:
        replica_id = _fresh_id(name, {*after, *survivors})
        memory = rows[name].revision(key).memory_mb
        reason = FINISHES if key in desired[name].wanted.leaving else ""
        after[replica_id] = ReplicaRow(replica_id, name, key, memory_mb=memory, reason=reason)
    return after


def _fresh_id(name: str, taken: set[str]) -> str:
    return next(candidate for n in range(len(taken) + 1) if (candidate := f"{name}-{n}") not in taken)
