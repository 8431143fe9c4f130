"""What is started and stopped for what is wanted, and who makes room: small fleets with little memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from toque.fleet.reconcile import Desired, Plan, Room, plan
from toque.fleet.revisions import first_row
from toque.fleet.rollout import Wanted
from toque.fleet.spec import DeploymentSpec, Resources
from toque.fleet.store import DeploymentRow, ReplicaRow, Revision
from toque.routing.base import ReplicaState

NAMES = ("a", "b", "c", "d")
NOW = 100.0


def row(name: str, memory_mb: int = 1, evictable: bool = True) -> DeploymentRow:
    spec = DeploymentSpec(name, "/v1", resources=Resources(memory_mb=memory_mb), evictable=evictable)
    return first_row(spec, Revision("", "/v1", "/v1"), 0.0)


def replica(
    name: str, number: int = 0, state: ReplicaState = ReplicaState.READY, **fields: object
) -> ReplicaRow:
    made = ReplicaRow(f"{name}-{number}", name, "/v1", 1, state=state, started_at=1.0, memory_mb=1)
    return replace(made, **fields)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, Desired], list[ReplicaRow], int]:
    desired, replicas = {}, []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        memory = draw(st.integers(1, 4))
        made = row(name, memory, draw(st.booleans()))
        waits = draw(st.booleans())
        desired[name] = Desired(
            made,
            Wanted({"/v1": draw(st.integers(0, 3))}, {"/v1": 1.0}),
            float(draw(st.integers(0, 3))) if waits else None,
            idle=not waits and draw(st.booleans()),
            used_at=float(draw(st.integers(0, 3))),
        )
        for number in range(draw(st.integers(0, 3))):
            state = draw(st.sampled_from([ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DEAD]))
            started = draw(st.sampled_from([0.0, 1.0]))
            replicas.append(
                replica(
                    name,
                    number,
                    state,
                    memory_mb=memory,
                    started_at=started,
                    gone=started > 0 and draw(st.booleans()),
                )
            )
    limit = max(sum(r.memory_mb for r in replicas), draw(st.integers(1, 12)))
    return desired, replicas, limit


def kept(result: Plan, replicas: list[ReplicaRow]) -> Counter[str]:
    return Counter(r.deployment for r in replicas if not r.gone and r.id not in result.stop)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(fleets())
def test_memory_is_never_exceeded_and_nobody_who_works_is_disturbed(
    fleet: tuple[dict[str, Desired], list[ReplicaRow], int],
) -> None:
    desired, replicas, limit = fleet
    result = plan(desired, replicas, Room(limit), NOW)
    added = Counter(name for name, _ in result.add)
    need = sum(desired[name].row.revisions[0].memory_mb * count for name, count in added.items())
    assert sum(r.memory_mb for r in replicas) + need <= limit
    staying = kept(result, replicas)
    for name, each in desired.items():
        have = staying[name] + added[name]
        assert have <= each.wanted.replicas["/v1"]
        if name not in result.refused and name not in result.evicted:
            assert have == each.wanted.replicas["/v1"]
    assert not set(result.start) & set(result.stop)
    assert len(set(result.stop)) == len(result.stop)
    for name in result.evicted:
        assert desired[name].idle
        assert desired[name].row.spec.evictable
        assert not staying[name]
    assert not result.evicted or any(
        name in result.refused and each.waiting_s is not None for name, each in desired.items()
    )


def waiting(name: str, memory_mb: int, waiting_s: float = 1.0) -> Desired:
    return Desired(row(name, memory_mb), Wanted({"/v1": 1}, {}), waiting_s, idle=False, used_at=NOW)


def resident(name: str, used_at: float, memory_mb: int = 1, **fields: object) -> Desired:
    made = Desired(row(name, memory_mb), Wanted({"/v1": 1}, {}), used_at=used_at)
    return replace(made, **fields)


def test_the_least_recently_used_make_room_as_many_as_it_takes() -> None:
    desired = {"a": resident("a", 30), "b": resident("b", 10), "c": resident("c", 20), "d": waiting("d", 2)}
    replicas = [replica("a"), replica("b"), replica("c")]
    result = plan(desired, replicas, Room(3), NOW)
    assert set(result.evicted) == {"b", "c"}
    assert result.evicted["b"] == "put to sleep to make room for d"
    assert result.refused["d"].reason == (
        "no room: a replica of d takes 2 MB, 0 of 3 MB are free and 2 MB are being freed"
    )
    going = [replica("a"), replica("b", gone=True), replica("c", gone=True)]
    again = plan({**desired, "b": resident("b", 10), "c": resident("c", 20)}, going, Room(3), NOW)
    assert again.evicted == {}  # what goes already is enough
    assert again.add == []  # and its place is not given to b and c again
    assert plan({**desired}, [replica("a")], Room(3), NOW).add == [("d", "/v1")]


def test_nobody_is_put_to_sleep_in_vain() -> None:
    desired = {"a": resident("a", 30), "b": resident("b", 10, idle=False), "d": waiting("d", 2)}
    result = plan(desired, [replica("a"), replica("b")], Room(2), NOW)
    assert result.evicted == {}
    assert not result.refused["d"].never


def test_who_has_waited_longest_comes_first() -> None:
    desired = {"a": waiting("a", 1, 1.0), "b": waiting("b", 1, 5.0), "c": resident("c", 0)}
    result = plan(desired, [replica("c")], Room(2), NOW)
    assert result.add == [("b", "/v1")]
    assert list(result.evicted) == ["c"]  # for a


def test_ready_replicas_stay_rather_than_others() -> None:
    desired = {"a": Desired(row("a"), Wanted({"/v1": 1}, {}))}
    replicas = [
        replica("a", 0, ReplicaState.STARTING),
        replica("a", 1, ready_at=5.0),
        replica("a", 2, ready_at=2.0),
        replica("a", 3, ReplicaState.DEAD, started_at=0.0),
    ]
    assert sorted(plan(desired, replicas, Room(9), NOW).stop) == ["a-0", "a-1", "a-3"]


def test_a_restart_waits_for_its_time() -> None:
    desired = {"a": Desired(row("a"), Wanted({"/v1": 1}, {}))}
    ended = replica("a", 0, ReplicaState.STARTING, started_at=0.0, retry_at=NOW + 1)
    assert plan(desired, [ended], Room(9), NOW).start == []
    assert plan(desired, [ended], Room(9), NOW + 1).start == ["a-0"]
