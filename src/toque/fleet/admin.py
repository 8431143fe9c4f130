"""What people ask of the fleet: every change of what shall be goes through here.

Each call returns as soon as the change is written; the controller acts on it, in this process or in another.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from toque.errors import ConflictError, NotFoundError, StoreError, UnavailableError
from toque.fleet import rollout as rollouts
from toque.fleet.revisions import (
    check,
    check_quiet,
    first_row,
    follows,
    offered,
    renewed,
    revision_of,
    roll,
    switch,
    unchanged,
)
from toque.fleet.spec import DeploymentSpec, RolloutPolicy
from toque.fleet.store import DeploymentRow, EngineValues, FleetStore, Proposal, ReplicaRow, Revision
from toque.fleet.views import (
    DeploymentView,
    ReplicaView,
    RolloutView,
    deployment_view,
    replica_view,
    rollout_view,
)
from toque.routing.base import RoutingTable

Resolve = Callable[[str], Awaitable[Revision]]
Edit = Callable[[DeploymentRow], DeploymentRow]
_ATTEMPTS = 8


class FleetAdmin:
    """Every method raises NotFoundError for a deployment that is not there, ConflictError (409) for what does not go
    with a rollout that is running, RequestError for a value that cannot be, and UnavailableError (503) while the
    store is away: then nothing was changed."""

    def __init__(
        self,
        store: FleetStore,
        resolve: Resolve,
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``resolve`` pins a reference to a version (and fetches it); its errors are passed on. ``on_change`` is told
        of every write. ``clock``: seconds since the epoch."""
        self._store = store
        self._resolve = resolve
        self._on_change = on_change
        self._clock = clock

    async def deploy(self, spec: DeploymentSpec) -> DeploymentView:
        """Makes the deployment, or changes it to this. Another model, another version or other engine options than
        before roll out as the specification says; nothing is restarted for the rest."""
        check(spec)
        pinned = await self._resolve(spec.model)
        revision = revision_of(pinned, spec)

        def edit(row: DeploymentRow) -> DeploymentRow:
            same = unchanged(row, revision)
            if same and row.spec == spec and not row.stopped:
                return row
            changed = replace(row, spec=spec, stopped=False, generation=row.generation + 1)
            if row.stopped:
                return switch(changed, revision)
            return (
                renewed(changed, revision) if same else roll(changed, revision, spec.rollout, self._clock())
            )

        found = await self._find(spec.name)
        if found is not None and found.deleted:
            raise ConflictError(
                f"deployment {spec.name} is being deleted: its replicas finish what they have"
            )
        if found is None:
            if not await self._put(first_row(spec, pinned, self._clock())):
                raise ConflictError(f"deployment {spec.name} was made by somebody else just now")
            self._on_change()
            return await self._view(spec.name)
        return await self._edit(spec.name, edit)

    async def scale(
        self, name: str, min_replicas: int | None = None, max_replicas: int | None = None
    ) -> DeploymentView:
        def edit(row: DeploymentRow) -> DeploymentRow:
            scaling = row.spec.scaling
            low = scaling.min_replicas if min_replicas is None else min_replicas
            high = max(scaling.max_replicas, low) if max_replicas is None else max_replicas
            spec = replace(row.spec, scaling=replace(scaling, min_replicas=low, max_replicas=high))
            check(spec)
            return replace(row, spec=spec, generation=row.generation + 1)

        return await self._edit(name, edit)

    async def stop(self, name: str) -> DeploymentView:
        """No replicas, whoever asks, until it is deployed or started again. Running requests get its grace."""

        def edit(row: DeploymentRow) -> DeploymentRow:
            check_quiet(row)
            return replace(row, stopped=True, generation=row.generation + 1)

        return await self._edit(name, edit)

    async def start(self, name: str) -> DeploymentView:
        """Ends what `stop` began."""
        return await self._edit(name, lambda row: replace(row, stopped=False, generation=row.generation + 1))

    async def delete(self, name: str) -> None:
        """It is gone once its replicas have finished what they have, within its grace."""

        def edit(row: DeploymentRow) -> DeploymentRow:
            return replace(row, deleted=True, generation=row.generation + 1)

        await self._edit(name, edit)

    async def start_rollout(
        self, name: str, model: str = "", policy: RolloutPolicy | None = None
    ) -> RolloutView:
        """To what ``model`` means now; "" is the deployment's own reference, whose alias may have moved."""
        row = await self._row(name)
        pinned = await self._resolve(model or row.spec.model)

        def edit(row: DeploymentRow) -> DeploymentRow:
            spec = replace(row.spec, model=model or row.spec.model)
            changed = replace(row, spec=spec, generation=row.generation + 1)
            return roll(changed, revision_of(pinned, spec), policy or spec.rollout, self._clock())

        await self._edit(name, edit)
        return await self.rollout(name)

    async def restart(
        self, name: str, engine: Mapping[str, bool | int | float | str | None] | None = None
    ) -> RolloutView:
        """Replaces every replica, one after another, with ``engine`` as the changed engine options (None takes one
        back to its default)."""

        def edit(row: DeploymentRow) -> DeploymentRow:
            options: EngineValues = {**row.spec.engine, **(engine or {})}
            spec = replace(row.spec, engine={k: v for k, v in options.items() if v is not None})
            check(spec)
            changed = replace(row, spec=spec, generation=row.generation + 1)
            policy = row.spec.rollout
            if policy.strategy == "canary":  # the same model: there is nothing to try out
                policy = replace(policy, strategy="auto")
            fresh = revision_of(row.revision(row.current), spec)
            if fresh.key in {revision.key for revision in row.revisions}:
                fresh = replace(fresh, key=f"{fresh.key}~{changed.generation}")
            return roll(changed, fresh, policy, self._clock())

        await self._edit(name, edit)
        return await self.rollout(name)

    async def pause(self, name: str) -> RolloutView:
        return await self._steer(name, rollouts.pause)

    async def resume(self, name: str) -> RolloutView:
        return await self._steer(name, lambda rollout: rollouts.resume(rollout, self._clock()))

    async def promote(self, name: str) -> RolloutView:
        return await self._steer(name, lambda rollout: rollouts.promote(rollout, self._clock()))

    async def undo(self, name: str) -> RolloutView:
        """Back to the version before: of a running rollout at once, after one by a rollout of its own."""

        def edit(row: DeploymentRow) -> DeploymentRow:
            if row.rollout is not None and row.rollout.running:
                back = rollouts.undo(row.rollout, self._clock())
                return replace(row, rollout=back, generation=row.generation + 1)
            if not row.previous:
                raise ConflictError(f"deployment {name} has had no other version")
            before = row.revision(row.previous)
            spec = replace(row.spec, model=before.reference, engine=before.engine)
            policy = row.spec.rollout
            if policy.strategy == "canary":  # it is known to work
                policy = replace(policy, strategy="auto")
            return roll(replace(row, spec=spec, generation=row.generation + 1), before, policy, self._clock())

        await self._edit(name, edit)
        return await self.rollout(name)

    async def propose(
        self, model: str, alias: str, version: str = "", digest: str = "", by: str = ""
    ) -> list[str]:
        """``model@alias`` points to ``version`` (a label) now, or to nothing: the deployments that follow it and run
        another one are offered a rollout. Their names."""

        def edit(row: DeploymentRow) -> DeploymentRow:
            if not follows(row, model, alias):  # any more
                return row
            proposal = Proposal(row.spec.model, version, digest, by, self._clock()) if digest else None
            return offered(row, proposal)

        rows, _, _ = await self._all()
        names = sorted(name for name, row in rows.items() if follows(row, model, alias))
        told = []
        for name in names:
            with suppress(
                NotFoundError, ConflictError
            ):  # gone, or changed too often: the others are told still
                if (await self._edit(name, edit)).proposed is not None:
                    told.append(name)
        return told

    async def deployments(self) -> list[DeploymentView]:
        rows, replicas, tables = await self._all()
        return [deployment_view(rows[name], replicas, tables.get(name)) for name in sorted(rows)]

    async def deployment(self, name: str) -> DeploymentView:
        return await self._view(name)

    async def replicas(self, deployment: str = "") -> list[ReplicaView]:
        rows, replicas, _ = await self._all()
        if deployment and deployment not in rows:
            raise _unknown(deployment)
        shown = [row for row in replicas if not deployment or row.deployment == deployment]
        return [replica_view(row, rows.get(row.deployment)) for row in sorted(shown, key=lambda row: row.id)]

    async def rollout(self, name: str) -> RolloutView:
        """The running one, or the last."""
        rows, replicas, tables = await self._all()
        row = rows.get(name)
        if row is None:
            raise _unknown(name)
        if row.rollout is None:
            raise NotFoundError(f"deployment {name} has had no rollout")
        own = [replica for replica in replicas if replica.deployment == name]
        return rollout_view(row, row.rollout, own, tables.get(name))

    async def _steer(self, name: str, step: Callable[[rollouts.Rollout], rollouts.Rollout]) -> RolloutView:
        def edit(row: DeploymentRow) -> DeploymentRow:
            if row.rollout is None:
                raise ConflictError(f"deployment {name} has no rollout")
            return replace(row, rollout=step(row.rollout), generation=row.generation + 1)

        await self._edit(name, edit)
        return await self.rollout(name)

    async def _edit(self, name: str, edit: Edit) -> DeploymentView:
        for _ in range(_ATTEMPTS):
            if await self._put(edit(await self._row(name))):
                self._on_change()
                return await self._view(name)
        raise ConflictError(f"deployment {name} is being changed by others all the time: try again")

    async def _view(self, name: str) -> DeploymentView:
        rows, replicas, tables = await self._all()
        if name not in rows:
            raise _unknown(name)
        return deployment_view(rows[name], replicas, tables.get(name))

    async def _row(self, name: str) -> DeploymentRow:
        row = await self._find(name)
        if row is None or row.deleted:
            raise _unknown(name)
        return row

    async def _find(self, name: str) -> DeploymentRow | None:
        try:
            return (await self._store.deployments()).get(name)
        except StoreError as error:
            raise _away(error) from error

    async def _put(self, row: DeploymentRow) -> bool:
        try:
            return await self._store.put(row)
        except StoreError as error:
            raise _away(error) from error

    async def _all(
        self,
    ) -> tuple[dict[str, DeploymentRow], list[ReplicaRow], Mapping[str, RoutingTable]]:
        try:
            found = await self._store.tables(after=-1)
            return (
                await self._store.deployments(),
                await self._store.replicas(),
                {} if found is None else found[1],
            )
        except StoreError as error:
            raise _away(error) from error


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"there is no deployment {name!r}", param="deployment")


def _away(error: StoreError) -> UnavailableError:
    return UnavailableError(
        f"nothing can be changed or listed now: {error.message}; serving goes on", retry_after_s=5.0
    )
