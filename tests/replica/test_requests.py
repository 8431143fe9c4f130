"""The table between sessions and engine, without I/O: every request ends once, and only its own client hears of it."""

from __future__ import annotations

import pytest

from replica.clients import Inbox
from toque.errors import EngineError
from toque.proto import replica_pb2 as pb
from toque.proto.messages import encode_submit, parse_client_message
from toque.replica import requests as table_module
from toque.replica.fake import FAILS, REFUSED, FakeEngine
from toque.replica.requests import Aborted, Ended, RequestTable, Session, Submitted
from toque.types import EngineRequest, SamplingParams


def submitted(session: Session, handle: int, prompt: tuple[int, ...], **sampling: object) -> Submitted:
    request = EngineRequest(f"r{handle}", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
    return Submitted(session, parse_client_message(encode_submit(handle, request)).submit)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def table(engine: FakeEngine) -> RequestTable:
    return RequestTable(engine, max_requests=8)


def finish(engine: FakeEngine, table: RequestTable) -> int:
    steps = 0
    while engine.has_work:
        table.deliver(engine.step())
        steps += 1
    return steps


def test_one_message_per_step_carries_every_sequence(engine: FakeEngine, table: RequestTable) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    for handle in range(5):
        table.apply(submitted(session, handle, (handle, 50), max_tokens=3))
    steps = finish(engine, table)
    assert steps == 3
    assert len(inbox.messages) == steps
    assert [inbox.tokens(h) for h in range(5)] == [[h, 50, h] for h in range(5)]
    assert len(table) == 0
    assert session.keys == {}


def test_sessions_may_use_the_same_handles_and_ids(engine: FakeEngine, table: RequestTable) -> None:
    inboxes = [Inbox(), Inbox()]
    sessions = [Session(i, inbox) for i, inbox in enumerate(inboxes)]
    for i, session in enumerate(sessions):
        table.apply(submitted(session, 1, (100 + i,), max_tokens=2))
    finish(engine, table)
    assert [inbox.tokens(1) for inbox in inboxes] == [[100, 100], [101, 101]]


def test_an_aborted_request_is_silent_and_frees_the_engine(engine: FakeEngine, table: RequestTable) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    table.apply(submitted(session, 1, (7,), max_tokens=100))
    table.apply(submitted(session, 2, (8,), max_tokens=2))
    table.deliver(engine.step())
    table.apply(Aborted(session, [1, 99]))
    finish(engine, table)
    assert inbox.tokens(1) == [7]
    assert inbox.tokens(2) == [8, 8]
    assert not inbox.errors


def test_the_end_of_a_session_ends_its_requests_only(engine: FakeEngine, table: RequestTable) -> None:
    gone, stays = Inbox(), Inbox()
    sessions = Session(1, gone), Session(2, stays)
    for session in sessions:
        table.apply(submitted(session, 1, (7,), max_tokens=3))
    table.apply(Ended(sessions[0]))
    assert len(table) == 1
    finish(engine, table)
    assert gone.messages == []
    assert stays.tokens(1) == [7, 7, 7]


def test_a_refusal_or_failure_reaches_the_request_concerned_only(
    engine: FakeEngine, table: RequestTable
) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    table.apply(submitted(session, 1, (REFUSED,)))
    table.apply(submitted(session, 2, (FAILS,)))
    table.apply(submitted(session, 3, (5,), max_tokens=2))
    finish(engine, table)
    assert [(e.handle, e.param) for e in inbox.errors] == [(1, "prompt")]
    details = [d for m in inbox.messages for d in m.step.details]
    assert [d.error for d in details] == ["this request failed", ""]
    assert inbox.tokens(3) == [5, 5]


def test_more_requests_than_the_bound_are_refused(engine: FakeEngine, table: RequestTable) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    for handle in range(9):
        table.apply(submitted(session, handle, (1,), max_tokens=1))
    assert [(e.handle, e.kind) for e in inbox.errors] == [(8, pb.RequestError.KIND_QUEUE_FULL)]
    assert "holds 8 requests" in inbox.errors[0].message
    assert finish(engine, table) == 1


def test_a_handle_in_use_is_refused_and_its_request_undisturbed(
    engine: FakeEngine, table: RequestTable
) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    table.apply(submitted(session, 1, (3,), max_tokens=2))
    table.apply(submitted(session, 1, (4,), max_tokens=2))
    assert len(inbox.errors) == 1
    finish(engine, table)
    assert inbox.tokens(1) == [3, 3]


def test_fail_all_tells_everybody_once(engine: FakeEngine, table: RequestTable) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    for handle in (1, 2):
        table.apply(submitted(session, handle, (3,)))
    table.fail_all(EngineError("boom"))
    assert sorted(e.handle for e in inbox.errors) == [1, 2]
    assert not engine.has_work
    assert len(table) == 0


def test_a_step_too_big_for_one_message_is_sent_in_pieces(
    engine: FakeEngine, table: RequestTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox()
    session = Session(1, inbox)
    table.apply(submitted(session, 1, tuple(range(1, 200)), max_tokens=2, prompt_logprobs=20))
    for handle in (2, 3):
        table.apply(submitted(session, handle, (handle,), max_tokens=2))
    monkeypatch.setattr(table_module, "MAX_TO_CLIENT", 1000)
    finish(engine, table)
    assert [(e.handle, e.param) for e in inbox.errors] == [(1, "prompt_logprobs")]
    assert inbox.tokens(2) == [2, 2]
    assert inbox.tokens(3) == [3, 3]
