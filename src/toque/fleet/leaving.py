"""Versions that take no new requests any more, and what they have begun. It remembers, but does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from toque.fleet.rollout import Wanted
from toque.fleet.store import DeploymentRow, ReplicaRow

MOURNED_S = 2.0  # what gateways need to say that requests were lost with a replica


class Leaving:
    """A version that is not wanted leaves: what its replicas have may be finished within the deployment's grace.

    Requests that have lost their replica meanwhile are given another one of their version, which leaves as soon as it
    has them. Until gateways had the time to ask for it, the room of a replica that died is nobody else's. Times are
    monotonic seconds.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}  # deployment and revision
        self._lost: dict[
            tuple[str, int], float
        ] = {}  # replicas that ended otherwise than by themselves, and when

    def lost(self, replica_id: str, epoch: int, now: float) -> None:
        """A process that was told to finish did not come to it."""
        self._lost.setdefault((replica_id, epoch), now)

    def mourned(self, row: ReplicaRow, stranded: Mapping[str, int], now: float) -> bool:
        """Whether the row of a process that is gone stays: perhaps it is about to be replaced."""
        at = self._lost.get((row.id, row.epoch))
        if at is None or now - at >= MOURNED_S or stranded.get(row.revision):
            return False
        return self._may_finish(row.deployment, row.revision, now)

    def replaced(self, deployment: str, stranded: Mapping[str, int], now: float) -> frozenset[str]:
        """The revisions that get a replica for the requests in ``stranded`` (by revision)."""
        return frozenset(key for key in stranded if self._may_finish(deployment, key, now))

    def completed(
        self,
        row: DeploymentRow,
        wanted: Wanted,
        running: Iterable[str],
        stranded: Mapping[str, int],
        now: float,
    ) -> Wanted:
        """``wanted`` with what leaving versions need. ``running``: revisions that have a replica, leaving ones too."""
        there = {*running, *stranded}
        for revision in row.revisions:
            place = (row.name, revision.key)
            if wanted.replicas.get(revision.key, 0):
                self._until.pop(place, None)
            elif revision.key in there:
                self._until.setdefault(place, now + row.spec.grace_s)
            elif self._until.get(place, now) <= now:
                self._until.pop(place, None)
        leaving = tuple(r.key for r in row.revisions if self._may_finish(row.name, r.key, now))
        if not leaving:
            return wanted
        more = dict.fromkeys((key for key in leaving if stranded.get(key)), 1)
        return replace(wanted, replicas={**wanted.replicas, **more}, leaving=leaving)

    def forget(self, rows: Mapping[str, DeploymentRow], replicas: Mapping[str, ReplicaRow]) -> None:
        """Drops what is known of all but these."""
        known = {(name, revision.key) for name, row in rows.items() for revision in row.revisions}
        self._until = {place: until for place, until in self._until.items() if place in known}
        processes = {(row.id, row.epoch) for row in replicas.values()}
        self._lost = {key: at for key, at in self._lost.items() if key in processes}

    def _may_finish(self, deployment: str, key: str, now: float) -> bool:
        return now < self._until.get((deployment, key), now)
