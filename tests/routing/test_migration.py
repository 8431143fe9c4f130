"""A stream whose replica dies goes on elsewhere as if nothing had been: at every token, with everything a request
can ask for. The replicas are real engines; only the wire is left out."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fixtures.byte_grammars import EOS, PADDED, SHARED
from fixtures.engines import make_engine
from fixtures.tiny import tiny_llama
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.engine.grammars import Grammars
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.errors import EngineError, ReplicaDiedError, UnavailableError, VersionGoneError
from toque.routing.base import (
    OnRoute,
    ReplicaEntry,
    ReplicaState,
    RouteEvent,
    RouteKind,
    RoutingTable,
    ServedVersion,
)
from toque.routing.journey import MoveBounds
from toque.routing.pool import ReplicaPool
from toque.text.grammar.spec import GrammarSpec
from toque.types import EngineRequest, EngineStats, FinishReason, ModelCard, SamplingParams, SequenceOutput

PROMPT = tuple(np.random.default_rng(21).integers(0, 160, 40).tolist())
N = 10
PATH = Path("/m")


@dataclass
class EngineSession:
    """A replica over an engine in this process. It dies under a request before its output number ``dies_at``."""

    engine: Engine
    dies_at: int | None = None
    gives_up_at: int | None = None
    state: ReplicaState = ReplicaState.READY
    reason: str = ""
    silent_s: float = 0.0
    card: ModelCard | None = None
    on_stats: Callable[[EngineStats], None] | None = None
    asked: list[EngineRequest] = field(default_factory=list)
    on_change: Callable[[], None] = lambda: None

    def start(self) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        self.asked.append(request)
        self.engine.add(request)
        given = 0
        try:
            while True:
                await asyncio.sleep(0)
                if given == self.dies_at:
                    self.state, self.reason = ReplicaState.DEAD, "killed"
                    self.on_change()
                    raise (ReplicaDiedError if given else UnavailableError)("killed")
                for output in self.engine.step():
                    if given == self.gives_up_at:
                        output = SequenceOutput(output.request_id, [], finish_reason=FinishReason.ERROR)
                        output.error, output.error_code = "the device is broken", EngineError.code
                    given += 1
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()


def tiny(backend: str = "cpu") -> Engine:
    return load_engine(tiny_llama(), EngineOptions(backend=backend, kv_blocks=32, max_sequences=4, threads=1))


def bytes_engine() -> Engine:
    return make_engine(
        executable=FakeExecutable(vocab_size=PADDED, block_size=4),
        n_blocks=64,
        context_length=200,
        grammars=Grammars(SHARED.compile),
    )


def table(*names: str, version: str = "v1", **fields: object) -> RoutingTable:
    entries = tuple(ReplicaEntry(name, 1, f"/{name}", version=version) for name in names)
    versions = {key: ServedVersion(key, PATH) for key in ("v1", "v2")}
    return RoutingTable("m", entries, versions, {version: 1.0}, **fields)  # type: ignore[arg-type]


def pool_of(*sessions: EngineSession, first: RoutingTable | None = None, **options: object) -> ReplicaPool:
    """``first``: the table to begin with, else all are of version v1."""
    left = list(sessions)

    def open_session(entry: ReplicaEntry, on_change: Callable[[], None]) -> EngineSession:
        session = left.pop(0)
        session.on_change = on_change
        return session

    pool = ReplicaPool("m", open_session=open_session, **options)  # type: ignore[arg-type]
    pool.apply(first or table(*(f"r{i}" for i in range(len(sessions)))))
    return pool


async def answer(
    pool: ReplicaPool, request: EngineRequest, on_route: OnRoute | None = None
) -> list[SequenceOutput]:
    return [output async for output in pool.of("v1").generate(request, on_route)]


def folded(outputs: list[SequenceOutput]) -> dict[str, object]:
    """All that a client can tell: everything but when it came and on which device."""
    return {
        "tokens": [t for o in outputs for t in o.tokens],
        "logprobs": [entry for o in outputs for entry in o.logprobs or ()],
        "prompt_logprobs": [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None],
        "cached": sum(o.cached_tokens for o in outputs),
        "finish": outputs[-1].finish_reason,
        "stop": outputs[-1].stop_token,
        "error": outputs[-1].error,
    }


WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=N),
    "seeded with everything": SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        seed=42,
        presence_penalty=1.2,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias=((3, 2.0), (17, -100.0)),
        logprobs=2,
        prompt_logprobs=1,
        min_tokens=7,
        stop_token_ids=tuple(range(0, 160, 2)),
        max_tokens=N,
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_killed_at_every_token_the_client_cannot_tell(way: str) -> None:
    request = EngineRequest("r", PROMPT, WAYS[way])
    expected = folded(await answer(pool_of(EngineSession(tiny())), request))
    length = len(expected["tokens"])  # type: ignore[arg-type]
    assert length > 6
    for at in range(length):
        first, second = EngineSession(tiny(), dies_at=at), EngineSession(tiny())
        heard: list[RouteEvent] = []
        got = folded(await answer(pool_of(first, second), request, heard.append))
        first.engine.close()
        second.engine.close()
        assert got == expected, f"killed before token {at}"
        kind = RouteKind.MIGRATED if at else RouteKind.RETRIED
        assert [(e.kind, e.replica_id, e.tokens) for e in heard] == [
            (RouteKind.ROUTED, "r0", 0),
            (kind, "r1", at),
        ]
        assert [len(r.generated) for r in second.asked] == [at]


async def test_killed_at_every_token_of_a_grammar() -> None:
    schema = GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["n"],
        }
    ).encode()
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=45, stop_token_ids=(EOS,))
    request = EngineRequest("r", (1, 2, 3), sampling, grammar=schema)
    expected = folded(await answer(pool_of(EngineSession(bytes_engine())), request))
    for at in range(0, len(expected["tokens"])):  # type: ignore[arg-type]
        sessions = EngineSession(bytes_engine(), dies_at=at), EngineSession(bytes_engine())
        assert folded(await answer(pool_of(*sessions), request)) == expected
    text = bytes(t for t in expected["tokens"] if t < 256)  # type: ignore[attr-defined]
    if expected["finish"] is FinishReason.STOP:
        assert 0 <= json.loads(text)["n"] <= 99


async def test_twice_in_one_answer() -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=12))
    expected = folded(await answer(pool_of(EngineSession(bytes_engine())), request))
    sessions = [EngineSession(bytes_engine(), dies_at=at) for at in (3, 4, None)]
    assert folded(await answer(pool_of(*sessions), request)) == expected
    assert [len(s.asked[0].generated) for s in sessions] == [0, 3, 7]


async def test_an_engine_that_gives_a_request_up_is_no_end_while_there_is_another() -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    expected = folded(await answer(pool_of(EngineSession(bytes_engine())), request))
    for at in (0, 5):
        sessions = EngineSession(bytes_engine(), gives_up_at=at), EngineSession(bytes_engine())
        assert folded(await answer(pool_of(*sessions), request)) == expected
    outputs = await answer(pool_of(EngineSession(bytes_engine(), gives_up_at=2)), request)
    assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, "the device is broken")


async def test_a_request_that_kills_at_one_token_stops_after_two_replicas() -> None:
    """It makes progress on the first replica, and none on those after it."""
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=12))
    sessions = [EngineSession(bytes_engine(), dies_at=at) for at in (4, 0, 0, 0)]
    pool = pool_of(*sessions)
    with pytest.raises(ReplicaDiedError, match="killed"):
        await answer(pool, request)
    assert [len(s.asked) for s in sessions] == [1, 1, 0, 0]


async def test_moves_are_bounded_however_far_it_comes() -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=40))
    sessions = [EngineSession(bytes_engine(), dies_at=1) for _ in range(6)]
    with pytest.raises(ReplicaDiedError):
        await answer(pool_of(*sessions, bounds=MoveBounds(moves=3)), request)
    assert [len(s.asked) for s in sessions] == [1, 1, 1, 1, 0, 0]


V1, V2 = (ReplicaEntry(f"r{i}", 1, f"/r{i}", version=f"v{i + 1}") for i in range(2))
VERSIONS = {key: ServedVersion(key, PATH) for key in ("v1", "v2")}
LEAVING = RoutingTable("m", (V1, V2), VERSIONS, {"v2": 1.0}, leaving=("v1",))


async def test_what_a_leaving_version_has_begun_goes_on_in_the_replica_that_is_started_for_it() -> None:
    """Its last replica dies while it drains; the table says only then that another one comes."""
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    expected = folded(await answer(pool_of(EngineSession(bytes_engine())), request))
    old, new, another = (EngineSession(bytes_engine(), dies_at=at) for at in (2, None, None))
    waits = asyncio.Event()
    pool = pool_of(old, new, another, first=LEAVING, on_wait=waits.set)
    draining = dataclasses.replace(V1, state=ReplicaState.DRAINING)
    begun = asyncio.create_task(answer(pool, request))
    await asyncio.sleep(0)
    pool.apply(dataclasses.replace(LEAVING, entries=(draining, V2)))
    async with asyncio.timeout(30):
        await waits.wait()
    assert (pool.waiting, pool.stranded) == (1, {"v1": 1})
    pool.apply(
        dataclasses.replace(LEAVING, entries=(V2,))
    )  # its row is gone, and the next one's not yet there
    fresh = dataclasses.replace(V1, replica_id="r2", epoch=2)
    pool.apply(dataclasses.replace(LEAVING, entries=(V2, fresh)))
    assert folded(await begun) == expected
    assert [len(r.generated) for r in another.asked] == [2]
    assert not new.asked
    assert pool.stranded == {}
    pool.apply(dataclasses.replace(LEAVING, entries=(V2,)))
    with pytest.raises(VersionGoneError):  # what begins now begins elsewhere
        await answer(pool, request)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (dataclasses.replace(LEAVING, entries=(V2,), leaving=()), "could not be continued"),  # time is over
        (
            dataclasses.replace(
                LEAVING, entries=(dataclasses.replace(V1, epoch=2, state=ReplicaState.DEAD, reason="bad"), V2)
            ),
            "bad",
        ),
    ],
)
async def test_what_a_leaving_version_has_begun_ends_where_nobody_comes(then: RoutingTable, why: str) -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    pool = pool_of(EngineSession(bytes_engine(), dies_at=2), EngineSession(bytes_engine()), first=LEAVING)
    begun = asyncio.create_task(answer(pool, request))
    async with asyncio.timeout(30):
        while not pool.stranded:
            await pool.changed(time.monotonic() + 0.01)
    pool.apply(then)
    with pytest.raises(ReplicaDiedError, match=why):
        await begun


async def test_what_was_accepted_and_not_begun_goes_to_another_version_or_waits_for_its_own() -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    for shares in ({"v2": 1.0}, {}):  # {}: the deployment is stopped
        old, new, another = (EngineSession(bytes_engine(), dies_at=at) for at in (0, None, None))
        pool = pool_of(old, new, another, first=dataclasses.replace(LEAVING, shares=shares))
        begun = asyncio.create_task(answer(pool, request))
        await asyncio.sleep(0)
        draining = dataclasses.replace(V1, state=ReplicaState.DRAINING)
        pool.apply(dataclasses.replace(LEAVING, shares=shares, entries=(draining, V2)))
        async with asyncio.timeout(30):
            while not (pool.stranded or begun.done()):
                await pool.changed(time.monotonic() + 0.01)
        if shares:
            with pytest.raises(UnavailableError):  # the gateway asks the other version
                await begun
            continue
        fresh = dataclasses.replace(V1, replica_id="r2", epoch=2)
        pool.apply(dataclasses.replace(LEAVING, shares={}, entries=(V2, fresh)))
        assert len(folded(await begun)["tokens"]) == 8  # type: ignore[arg-type]


async def test_goes_on_only_on_its_own_version() -> None:
    request = EngineRequest("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    old, new = EngineSession(bytes_engine(), dies_at=2), EngineSession(bytes_engine())
    pool = pool_of(old, new)
    entries = (ReplicaEntry("r0", 1, "/r0", version="v1"), ReplicaEntry("r1", 1, "/r1", version="v2"))
    versions = {key: ServedVersion(key, PATH) for key in ("v1", "v2")}
    pool.apply(RoutingTable("m", entries, versions, {"v2": 1.0}))
    waiting = asyncio.create_task(answer(pool, request))
    async with asyncio.timeout(30):
        while not pool.waiting:
            await pool.changed(time.monotonic() + 0.01)
    await asyncio.sleep(0.05)
    assert not new.asked
    assert pool.waiting == 1
    # The fleet gives its version up: what has begun cannot go on, what has not is told so.
    dead = ReplicaEntry("r0", 1, "/r0", ReplicaState.DEAD, "killed", version="v1")
    pool.apply(RoutingTable("m", (dead, entries[1]), versions, {"v2": 1.0}))
    with pytest.raises(ReplicaDiedError, match="could not be continued"):
        await waiting
    with pytest.raises(VersionGoneError):
        await answer(pool, request)
