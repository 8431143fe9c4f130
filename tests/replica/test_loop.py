"""The step loop, its health and the replica's state, with a clock of our own where time matters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from replica.clients import Inbox
from toque.errors import EngineError, WireError
from toque.proto import replica_pb2 as pb
from toque.proto.messages import encode_hello, encode_submit, unpack
from toque.replica.fake import BREAKS_STEP, FakeEngine
from toque.replica.health import Progress
from toque.replica.loop import StepLoop
from toque.replica.replica import Replica
from toque.replica.requests import RequestTable
from toque.types import EngineRequest, SamplingParams, SequenceOutput


def test_progress_counts_from_the_last_step_while_there_is_work() -> None:
    progress = Progress()
    assert progress.stalled_s(100) == 0
    progress.working(100)
    progress.working(101)
    assert progress.stalled_s(103) == 3
    progress.advanced(104)
    assert progress.stalled_s(105) == 1
    progress.idle()
    assert progress.stalled_s(200) == 0


class Running:
    """A replica whose loop runs in a thread, driven through the same calls that carriers make."""

    def __init__(self, engine: FakeEngine, stall_s: float = 3.0) -> None:
        self.replica = Replica("r", stall_s=stall_s)
        self.table = RequestTable(engine, max_requests=100)
        self.loop = StepLoop(engine, self.table, self.replica.progress, self.replica.publish)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.inbox = Inbox()
        self.session = self.replica.open(self.inbox)
        self.replica.receive(self.session, encode_hello("test"))

    def start(self) -> None:
        self.thread.start()
        self.replica.ready(self.loop, pb.Model(architecture="fake"), 64)

    def submit(self, handle: int, *prompt: int, **sampling: object) -> None:
        request = EngineRequest(f"r{handle}", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
        self.replica.receive(self.session, encode_submit(handle, request))

    def wait(self, handle: int) -> None:
        """Until that request has ended in one way or the other."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for message in list(self.inbox.messages):
                if message.error.handle == handle:
                    return
                if any(
                    unpack(message.step.handles)[d.index] == handle and d.finish for d in message.step.details
                ):
                    return
            time.sleep(0.005)
        pytest.fail(f"request {handle} did not end")

    @property
    def states(self) -> list[int]:
        return [m.description.state for m in self.inbox.messages if m.WhichOneof("body") == "description"]

    def _run(self) -> None:
        try:
            self.loop.run()
        except EngineError as error:
            self.error = error


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(FakeEngine(step_s=0.002))
    yield running
    if running.thread.is_alive():
        running.replica.drain(0, "the test is over")
        running.thread.join(60)


def test_submits_while_loading_are_refused(running: Running) -> None:
    running.submit(1, 5)
    assert [e.kind for e in running.inbox.errors] == [pb.RequestError.KIND_UNAVAILABLE]
    running.start()
    running.submit(2, 5, max_tokens=2)
    running.wait(2)
    assert running.inbox.tokens(2) == [5, 5]
    assert running.states == [pb.STATE_STARTING, pb.STATE_READY]


def test_a_drain_while_loading_ends_the_loop_as_it_starts(running: Running) -> None:
    running.replica.drain(5, "bye")
    running.start()
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert running.states == [pb.STATE_STARTING, pb.STATE_DRAINING]


def test_a_draining_loop_finishes_what_it_has(running: Running) -> None:
    running.start()
    running.submit(1, 5, max_tokens=40)
    running.replica.drain(30, "bye")
    running.submit(2, 6)
    running.thread.join(60)
    assert running.inbox.tokens(1) == [5] * 40
    assert [(e.handle, e.kind) for e in running.inbox.errors] == [(2, pb.RequestError.KIND_UNAVAILABLE)]


def test_the_end_of_the_grace_is_told_to_who_is_left(running: Running) -> None:
    running.start()
    running.submit(1, 5, max_tokens=100_000)
    running.replica.drain(0.05, "bye")
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert [e.handle for e in running.inbox.errors] == [1]


def test_an_engine_that_breaks_again_and_again_ends_the_loop(running: Running) -> None:
    running.start()
    for handle in (1, 2, 3):
        running.submit(handle, BREAKS_STEP)
        running.wait(handle)
    running.thread.join(60)
    assert "3 steps in a row failed" in str(running.error)
    assert [e.handle for e in running.inbox.errors] == [1, 2, 3]


def test_a_good_step_forgives_the_ones_before(running: Running) -> None:
    running.start()
    for handle in range(1, 6):
        running.submit(handle, BREAKS_STEP)
        running.wait(handle)
        running.submit(10 + handle, 5, max_tokens=1)
        running.wait(10 + handle)
    assert running.error is None


def test_a_request_that_the_engine_loses_is_told_so(running: Running) -> None:
    engine = running.loop._engine
    assert isinstance(engine, FakeEngine)
    step = engine.step

    def losing_step() -> list[SequenceOutput]:
        outputs = step()
        engine._open.clear()
        return outputs

    engine.step = losing_step  # type: ignore[method-assign]
    running.start()
    running.submit(1, 5, max_tokens=10)
    running.wait(1)
    assert running.inbox.errors[0].message == "the engine lost the request"


def test_degraded_while_a_step_takes_too_long_and_ready_again_after_it() -> None:
    engine, seen = FakeEngine(), threading.Event()
    step = engine.step
    engine.step = lambda: (seen.wait(60), step())[1]  # type: ignore[method-assign]
    running = Running(engine, stall_s=0.2)
    running.start()
    running.submit(1, 5, max_tokens=1)
    until = time.monotonic() + 60
    while running.states[-1] != pb.STATE_DEGRADED and time.monotonic() < until:
        time.sleep(0.02)
        running.replica.tick(time.monotonic())
    seen.set()
    running.wait(1)
    running.replica.tick(time.monotonic())
    running.replica.drain(0, "bye")
    running.thread.join(60)
    assert running.states == [
        pb.STATE_STARTING,
        pb.STATE_READY,
        pb.STATE_DEGRADED,
        pb.STATE_READY,
        pb.STATE_DRAINING,
    ]


def test_a_heartbeat_each_half_second_also_when_idle(running: Running) -> None:
    running.start()
    time.sleep(0.05)
    before = sum(m.WhichOneof("body") == "stats" for m in running.inbox.messages)
    now = time.monotonic()
    running.replica.tick(now + 0.5)
    running.replica.tick(now + 0.3)
    after = sum(m.WhichOneof("body") == "stats" for m in running.inbox.messages)
    assert after == before + 1


def test_a_session_starts_with_hello_in_our_protocol() -> None:
    replica = Replica("r")
    with pytest.raises(WireError, match="protocol 9"):
        replica.receive(
            replica.open(Inbox()), pb.ClientMessage(hello=pb.Hello(protocol=9)).SerializeToString()
        )
    with pytest.raises(WireError, match="starts with hello"):
        replica.receive(replica.open(Inbox()), pb.ClientMessage(drain=pb.Drain()).SerializeToString())
    assert replica.n_sessions == 0


def test_a_session_that_starts_while_the_state_changes_hears_of_it() -> None:
    """Whatever the interleaving, the last description that a session gets is the current one."""
    for _ in range(300):
        replica = Replica("r")
        inbox = Inbox()
        session = replica.open(inbox)
        greeting = threading.Thread(target=replica.receive, args=(session, encode_hello("test")))
        greeting.start()
        replica.died("gone")
        greeting.join()
        assert [m for m in inbox.messages if m.HasField("description")][-1].description.state == pb.STATE_DEAD


def test_what_can_wait_is_done_once_when_the_loop_has_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.replica.loop.REST_S", 0.01)
    engine, done = FakeEngine(), threading.Event()
    calls: list[bool] = []
    running = Running(engine)
    running.loop = StepLoop(
        engine,
        running.table,
        running.replica.progress,
        running.replica.publish,
        at_rest=lambda: (calls.append(True), done.set()),
    )
    running.start()
    assert done.wait(60)
    for handle in (1, 2):
        running.submit(handle, 1, 2, max_tokens=1)
        running.wait(handle)
    running.loop.drain(0)
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert calls == [True]


def test_what_can_wait_does_not_come_before_a_request_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toque.replica.loop.REST_S", 0.0)
    engine = FakeEngine()
    order: list[str] = []
    running = Running(engine)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (order.append("step"), step())[1])
    running.loop = StepLoop(
        engine,
        running.table,
        running.replica.progress,
        running.replica.publish,
        at_rest=lambda: order.append("rest"),
    )
    running.replica.ready(running.loop, pb.Model(architecture="fake"), 64)
    running.submit(1, 1, 2, max_tokens=1)
    running.thread.start()
    running.wait(1)
    running.loop.drain(0)
    running.thread.join(60)
    assert order[0] == "step"
