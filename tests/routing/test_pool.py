"""The pool against scripted replicas: where a request goes, when it is sent again, and when it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from toque.errors import DeadlineError, QueueFullError, ReplicaDiedError, RequestError, UnavailableError
from toque.routing.base import OnRoute, ReplicaEntry, ReplicaState, RouteEvent, RouteKind, RoutingTable
from toque.routing.fake import FakeEngineClient, Script
from toque.routing.pool import ReplicaPool
from toque.types import EngineRequest, EngineStats, ModelCard, SamplingParams, SequenceOutput


def table(*entries: ReplicaEntry, **fields: object) -> RoutingTable:
    return RoutingTable("m", entries, **fields)  # type: ignore[arg-type]


@dataclass
class FakeSession(FakeEngineClient):
    """A scripted replica as the pool sees it; ``die`` makes it fail what it has not begun, like a real one."""

    on_change: Callable[[], None] = lambda: None
    silent_s: float = 0.0
    card: ModelCard | None = None
    started: bool = False
    closed: bool = False
    on_stats: Callable[[EngineStats], None] | None = None
    given_up: list[asyncio.Event] = field(default_factory=list)

    def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    def abandon(self, why: str) -> None:
        for each in self.given_up:
            each.set()

    def become(self, state: ReplicaState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.on_change()

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        given_up = asyncio.Event()
        self.given_up.append(given_up)
        started = False
        try:
            async with aclosing(super().generate(request)) as outputs:
                while True:
                    following = asyncio.ensure_future(anext(outputs))
                    giving_up = asyncio.ensure_future(given_up.wait())
                    try:
                        await asyncio.wait({following, giving_up}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        giving_up.cancel()
                        if not following.done():
                            following.cancel()
                            await asyncio.wait({following})
                    if following.cancelled():
                        raise (ReplicaDiedError if started else UnavailableError)("nothing heard")
                    try:
                        output = following.result()
                    except StopAsyncIteration:
                        return
                    started = True
                    yield output
        except (UnavailableError, ReplicaDiedError) as error:
            if error.message.startswith("died"):
                self.state, self.reason = ReplicaState.DEAD, "killed"
            raise
        finally:
            self.given_up.remove(given_up)


@dataclass
class Fleet:
    """A pool and the sessions that it opened, by entry."""

    scripts: dict[str, Script] = field(default_factory=dict)
    sessions: dict[tuple[str, int], FakeSession] = field(default_factory=dict)
    state: ReplicaState = ReplicaState.READY

    def open(self, entry: ReplicaEntry, on_change: Callable[[], None]) -> FakeSession:
        script = self.scripts.get(f"{entry.replica_id}.{entry.epoch}", Script(tokens=[1, 2, 3]))
        session = FakeSession(script, state=self.state, on_change=on_change)
        self.sessions[entry.replica_id, entry.epoch] = session
        return session

    def pool(self, **options: object) -> ReplicaPool:
        options = {"wait_s": 5.0, **options}
        return ReplicaPool("m", open_session=self.open, **options)  # type: ignore[arg-type]


def entry(
    replica_id: str, epoch: int = 1, state: ReplicaState = ReplicaState.STARTING, reason: str = ""
) -> ReplicaEntry:
    return ReplicaEntry(replica_id, epoch, f"/{replica_id}.{epoch}", state, reason)


def request(name: str = "r", deadline: float | None = None) -> EngineRequest:
    return EngineRequest(name, (1,), SamplingParams(), deadline=deadline)


async def collect(pool: ReplicaPool, asked: EngineRequest | None = None) -> list[int]:
    return [token async for output in pool.generate(asked or request()) for token in output.tokens]


async def test_spreads_over_the_least_loaded() -> None:
    fleet = Fleet({"a.1": Script(tokens=[1, 2], delay_s=0.05), "b.1": Script(tokens=[1, 2], delay_s=0.05)})
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b")))
    await asyncio.gather(*(collect(pool, request(str(i))) for i in range(10)))
    assert [len(s.requests) for s in fleet.sessions.values()] == [5, 5]
    await pool.close()
    assert all(s.closed for s in fleet.sessions.values())


async def test_what_was_not_begun_is_tried_on_another_replica() -> None:
    fleet = Fleet({"a.1": Script(error=UnavailableError("died"))})
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b")))
    assert await collect(pool) == [1, 2, 3]
    assert [len(s.requests) for s in fleet.sessions.values()] == [1, 1]
    await pool.close()


async def test_a_request_that_kills_replicas_stops_after_two() -> None:
    fleet = Fleet({f"{name}.1": Script(error=UnavailableError("died")) for name in "abc"})
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b"), entry("c")))
    with pytest.raises(UnavailableError, match="died"):
        await collect(pool)
    assert sum(len(s.requests) for s in fleet.sessions.values()) == 2
    await pool.close()


async def test_waits_for_a_restarted_replica_and_goes_there() -> None:
    fleet = Fleet({"a.1": Script(error=UnavailableError("died"))})
    pool = fleet.pool()
    pool.apply(table(entry("a")))
    reading = asyncio.create_task(collect(pool))
    async with asyncio.timeout(30):
        while not pool.waiting:
            await pool.changed(time.monotonic() + 0.01)
    assert (pool.waiting, pool.state) == (1, ReplicaState.STARTING)
    assert "restarting: killed" in pool.reason
    pool.apply(table(entry("a", 2)))
    assert await reading == [1, 2, 3]
    assert fleet.sessions["a", 1].closed
    await pool.close()


async def test_refusals_of_the_request_are_not_tried_elsewhere() -> None:
    fleet = Fleet({"a.1": Script(error=RequestError("no"))})
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b")))
    with pytest.raises(RequestError, match="no"):
        await collect(pool)
    assert not fleet.sessions["b", 1].requests
    await pool.close()


async def test_a_full_replica_is_passed_over_and_all_full_is_said() -> None:
    fleet = Fleet(
        {"a.1": Script(error=QueueFullError("full")), "b.1": Script(error=QueueFullError("full too"))}
    )
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b")))
    with pytest.raises(QueueFullError, match="full too"):
        await collect(pool)
    await pool.close()


async def test_waits_while_replicas_load_but_not_for_ever_and_not_too_many() -> None:
    fleet = Fleet(state=ReplicaState.STARTING)
    pool = fleet.pool(wait_s=0.2, max_waiting=2)
    pool.apply(table(entry("a")))
    reading = [asyncio.create_task(collect(pool, request(str(i)))) for i in range(2)]
    await asyncio.sleep(0.01)
    assert pool.stats().waiting == 2
    with pytest.raises(QueueFullError, match="2 requests wait"):
        await collect(pool)
    fleet.sessions["a", 1].become(ReplicaState.READY)
    assert await asyncio.gather(*reading) == [[1, 2, 3]] * 2
    fleet.sessions["a", 1].become(ReplicaState.STARTING, "loading")
    with pytest.raises(UnavailableError, match="loading"):
        await collect(pool)
    await pool.close()


async def test_a_deadline_ends_the_wait() -> None:
    pool = Fleet(state=ReplicaState.STARTING).pool(wait_s=5)
    pool.apply(table(entry("a")))
    with pytest.raises(DeadlineError):
        await collect(pool, request(deadline=time.time() - 1))
    await pool.close()


async def test_a_crash_loop_fails_requests_at_once_with_its_reason() -> None:
    fleet = Fleet(state=ReplicaState.STARTING)
    pool = fleet.pool()
    pool.apply(table(entry("a")))
    waiting = asyncio.create_task(collect(pool))
    await asyncio.sleep(0.01)
    pool.apply(table(entry("a", 2, ReplicaState.DEAD, "tensor 7 is cut off")))
    with pytest.raises(UnavailableError, match="tensor 7 is cut off"):
        await waiting
    assert (pool.state, pool.reason) == (ReplicaState.DEAD, "tensor 7 is cut off")
    with pytest.raises(UnavailableError, match="tensor 7 is cut off"):
        await pool.wait_ready(5)
    await pool.close()


async def test_degraded_and_draining_replicas_are_avoided_while_another_is_ready() -> None:
    fleet = Fleet()
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b"), entry("c", state=ReplicaState.DRAINING)))
    fleet.sessions["a", 1].become(ReplicaState.DEGRADED)
    await collect(pool)
    assert [len(s.requests) for s in fleet.sessions.values()] == [0, 1, 0]
    fleet.sessions["b", 1].become(ReplicaState.DRAINING)
    await collect(pool)
    assert [len(s.requests) for s in fleet.sessions.values()] == [1, 1, 0]
    await pool.close()


async def test_closing_ends_those_who_wait() -> None:
    pool = Fleet(state=ReplicaState.STARTING).pool()
    pool.apply(table(entry("a")))
    waiting = asyncio.create_task(collect(pool))
    await asyncio.sleep(0.01)
    await pool.close()
    with pytest.raises(UnavailableError):
        await waiting


async def test_abandoning_an_answer_reaches_the_replica() -> None:
    fleet = Fleet({"a.1": Script(tokens=[1], hold=True)})
    pool = fleet.pool()
    pool.apply(table(entry("a")))
    stream = pool.generate(request())
    await anext(stream)
    await stream.aclose()
    assert fleet.sessions["a", 1].aborted == ["r"]
    await pool.close()


async def test_stats_are_the_sum() -> None:
    fleet = Fleet()
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b")))
    await collect(pool)
    await collect(pool)
    assert (pool.stats().generated_tokens, pool.stats().prompt_tokens) == (6, 2)
    await pool.close()


async def test_tells_where_a_request_went_and_why() -> None:
    fleet = Fleet({"a.1": Script(error=UnavailableError("died"))}, state=ReplicaState.STARTING)
    pool = fleet.pool()
    pool.apply(table(entry("a"), entry("b", 3)))
    heard: list[RouteEvent] = []

    async def read() -> None:
        async for _ in pool.generate(request(), heard.append):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    for session in fleet.sessions.values():
        session.become(ReplicaState.READY)
    await reading
    told = [(event.kind, event.replica_id, event.epoch, event.reason) for event in heard]
    assert told == [
        (RouteKind.HELD, "", 0, "starting"),
        (RouteKind.ROUTED, "a", 1, ""),
        (RouteKind.RETRIED, "b", 3, "died"),
    ]
    assert all(abs(event.at - time.time()) < 5 for event in heard)
    await pool.close()


async def hedged(first: Script, second: Script, after_s: float = 0.02) -> tuple[list[int], list[str], Fleet]:
    """The answer of a pool that hedges after so long, what became of the request, and the replicas."""
    fleet = Fleet({"a.1": first, "b.1": second})
    pool = fleet.pool(hedge_after_s=after_s)
    pool.apply(table(entry("a"), entry("b")))
    heard: list[RouteEvent] = []
    got = [token async for output in pool.generate(request(), heard.append) for token in output.tokens]
    await asyncio.sleep(0)
    assert pool.running == 0
    await pool.close()
    return got, [f"{event.kind} {event.replica_id}" for event in heard], fleet


async def test_a_slow_first_token_is_asked_for_twice_and_the_first_to_speak_goes_on() -> None:
    got, heard, fleet = await hedged(
        Script(tokens=[1, 1], first_delay_s=5), Script(tokens=[2, 2], delay_s=0.1)
    )
    assert got == [2, 2]
    assert heard == ["routed a", "hedged b", "won b"]
    assert fleet.sessions["a", 1].aborted == ["r"]
    got, heard, fleet = await hedged(
        Script(tokens=[1, 1], first_delay_s=0.4), Script(tokens=[2, 2], first_delay_s=5)
    )
    assert got == [1, 1]
    assert fleet.sessions["b", 1].aborted == ["r"]


async def test_a_quick_first_token_is_not_asked_for_twice() -> None:
    got, heard, fleet = await hedged(Script(tokens=[1, 1], delay_s=0.1), Script(tokens=[2]), 1.0)
    assert (got, heard) == ([1, 1], ["routed a"])
    assert not fleet.sessions["b", 1].requests


async def test_one_of_two_that_dies_leaves_the_other_to_answer() -> None:
    dying = Script(error=UnavailableError("died"), first_delay_s=0.3)
    got, heard, _ = await hedged(dying, Script(tokens=[2, 2], first_delay_s=1))
    assert got == [2, 2]
    got, heard, _ = await hedged(Script(tokens=[1, 1], first_delay_s=1), dying)
    assert got == [1, 1]
    assert heard == ["routed a", "hedged b", "won a"]
    with pytest.raises(UnavailableError, match="killed"):
        await hedged(dying, dying)
