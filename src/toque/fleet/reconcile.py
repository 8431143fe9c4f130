"""What to start and what to stop, so that there is what is wanted and memory suffices. Pure.

Memory is counted by what each replica is said to take, from its start until its process is gone. What does not fit is
not started, and the refusal says the numbers. A deployment that requests wait for may put others to sleep: the least
recently used ones first, as many as it takes and none if they would not do, and only such as are idle and say that
they may be. What it waits for meanwhile nobody else may take. The same goes for a swap in place: the room of the old
version is the new one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from toque.fleet.lifecycle import due, exists
from toque.fleet.rollout import HOLDING, Wanted
from toque.fleet.store import DeploymentRow, ReplicaRow
from toque.routing.base import ReplicaState

REFUSED = "no room: "  # how a refusal's reason begins


class Desired(Struct, frozen=True):
    """One deployment in `plan`. ``waiting_s``: for how long a request has waited that none of its replicas can take
    (None: there is none). ``idle``: no request is anywhere. ``used_at``: when one last was."""

    row: DeploymentRow
    wanted: Wanted
    waiting_s: float | None = None
    idle: bool = True
    used_at: float = 0.0


class Room(Struct, frozen=True):
    """The machine's memory in MiB: what replicas may take in all (``limit_mb``)."""

    limit_mb: int


class Refusal(Struct, frozen=True):
    """Why a replica is not started. ``never``: it would not fit into an empty machine."""

    reason: str
    never: bool = False


class Plan(Struct, frozen=True):
    """``add``: new replicas, by deployment and revision; ``start``: ids of replicas whose next process is due;
    ``stop``: ids; ``evicted``: deployments that make room, with the reason; ``refused``: by deployment."""

    add: list[tuple[str, str]] = []
    start: list[str] = []
    stop: list[str] = []
    evicted: dict[str, str] = {}
    refused: dict[str, Refusal] = {}


def plan(desired: Mapping[str, Desired], replicas: Sequence[ReplicaRow], room: Room, now: float) -> Plan:
    result = Plan()
    result.start.extend(row.id for row in replicas if due(row, now))
    staying = _stop_surplus(desired, replicas, result)
    have = Counter((row.deployment, row.revision) for row in staying)
    short: list[tuple[Desired, str]] = []
    for each in desired.values():
        for key, count in each.wanted.replicas.items():
            short += [(each, key)] * (count - have[each.row.name, key])
    short.sort(key=lambda item: _turn(item[0]))
    taken = sum(row.memory_mb for row in replicas)
    leaving = sum(row.memory_mb for row in replicas if row.gone or row.id in result.stop)
    for each, key in short:
        name, need = each.row.name, each.row.revision(key).memory_mb
        if taken + need <= room.limit_mb:
            result.add.append((name, key))
            taken += need
        elif need > room.limit_mb:
            result.refused[name] = Refusal(
                f"{REFUSED}a replica of {name} takes {need} MB, more than the {room.limit_mb} MB for all replicas",
                never=True,
            )
        else:
            free = room.limit_mb - taken
            if _urgent(each):
                leaving += _make_room(each, need - free - leaving, desired, staying, result)
                taken += need  # nobody who is less urgent gets it
            result.refused.setdefault(
                name,
                Refusal(
                    f"{REFUSED}a replica of {name} takes {need} MB, {max(0, free)} of {room.limit_mb} MB are free"
                    + (f" and {leaving} MB are being freed" if leaving else "")
                ),
            )
    stopping = set(result.stop)
    result.start[:] = [replica_id for replica_id in result.start if replica_id not in stopping]
    return result


def _urgent(each: Desired) -> bool:
    """Requests wait for it, or would if there were any."""
    rollout = each.row.rollout
    return each.waiting_s is not None or (rollout is not None and rollout.phase in HOLDING)


def _turn(each: Desired) -> tuple[bool, bool, float, bool]:
    """Whose arrivals are held comes first, then whom requests wait for, by how long they have, then other rollouts;
    the rest in the order they are named in."""
    rollout = each.row.rollout
    held = rollout is not None and rollout.phase in HOLDING
    rolls = rollout is not None and rollout.running
    return not held, each.waiting_s is None, -(each.waiting_s or 0.0), not rolls


def _stop_surplus(
    desired: Mapping[str, Desired], replicas: Sequence[ReplicaRow], result: Plan
) -> list[ReplicaRow]:
    """What is not wanted goes; returns what stays."""
    staying = []
    groups: dict[tuple[str, str], list[ReplicaRow]] = {}
    for row in replicas:
        if not row.gone:
            groups.setdefault((row.deployment, row.revision), []).append(row)
    for (name, key), rows in groups.items():
        each = desired.get(name)
        keep = each.wanted.replicas.get(key, 0) if each is not None else 0
        rows.sort(key=_worth, reverse=True)
        staying += rows[:keep]
        result.stop.extend(row.id for row in rows[keep:])
    return staying


def _worth(row: ReplicaRow) -> tuple[int, bool, float]:
    """Ready ones stay rather than others, and then the older ones: they know more prefixes."""
    order = {ReplicaState.READY: 3, ReplicaState.DEGRADED: 2, ReplicaState.STARTING: 1}
    return order.get(row.state, 0), exists(row), -row.ready_at


def _make_room(
    beneficiary: Desired,
    missing_mb: int,
    desired: Mapping[str, Desired],
    staying: list[ReplicaRow],
    result: Plan,
) -> int:
    """Evicts for it if that is enough; the MiB that come free by it."""
    victims: list[tuple[str, int]] = []
    for other in sorted(desired.values(), key=lambda each: each.used_at):
        if missing_mb <= 0:
            break
        name = other.row.name
        rollout = other.row.rollout
        mine = [row for row in staying if row.deployment == name]
        if (
            other is beneficiary
            or name in result.evicted
            or not mine
            or not other.idle
            or not other.row.spec.evictable
            or (rollout is not None and rollout.running)
        ):
            continue
        freed = sum(row.memory_mb for row in mine)
        victims.append((name, freed))
        missing_mb -= freed
    if missing_mb > 0:
        return 0
    for name, _ in victims:
        result.evicted[name] = f"put to sleep to make room for {beneficiary.row.name}"
        result.stop.extend(row.id for row in staying if row.deployment == name)
        staying[:] = [row for row in staying if row.deployment != name]
    return sum(freed for _, freed in victims)
