"""What the carriers serve: the sessions of one replica, its description and its heartbeat."""

from __future__ import annotations

import os
import threading
import time

from toque.errors import UnavailableError, WireError
from toque.proto import replica_pb2 as pb
from toque.proto.messages import PROTOCOL, encode_error, encode_stats, parse_client_message
from toque.replica.health import Progress
from toque.replica.loop import StepLoop
from toque.replica.requests import Aborted, Ended, Link, Session, Submitted
from toque.replica.usage import with_process
from toque.types import EngineStats

HEARTBEAT_S = 0.5
MAX_GRACE_S = 24 * 3600.0


class Replica:
    """One engine's sessions. Every method may be called from any thread and returns at once.

    A session that breaks the protocol raises WireError out of ``receive``: the carrier closes it, which ends its
    requests and disturbs nobody else's.
    """

    def __init__(self, name: str, *, stall_s: float = 3.0) -> None:
        self.progress = Progress()
        self.lonely_since = time.monotonic()  # since when nobody has had a session
        self._name = name
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._state = pb.STATE_STARTING
        self._reason = "loading the model"
        self._model: pb.Model | None = None
        self._max_sequences = 0
        self._loop: StepLoop | None = None
        self._drain_grace_s: float | None = None
        self._sessions: tuple[Session, ...] = ()  # replaced, never changed: readers need no lock
        self._numbers = 0
        self._said: tuple[int, str] = (self._state, self._reason)
        self._stats = EngineStats()
        self._stats_at = 0.0

    # Life of the process

    def ready(self, loop: StepLoop, model: pb.Model, max_sequences: int) -> None:
        with self._lock:
            self._loop, self._model, self._max_sequences = loop, model, max_sequences
            if self._drain_grace_s is None:
                self._state, self._reason = pb.STATE_READY, ""
            else:
                loop.drain(self._drain_grace_s)
        self._tell()

    def drain(self, grace_s: float, why: str) -> None:
        """Takes nothing new from now on. While the model is still loading, the loop ends as soon as it starts."""
        grace_s = min(max(grace_s, 0.0), MAX_GRACE_S)
        with self._lock:
            if self._state == pb.STATE_DEAD:
                return
            self._state, self._reason = pb.STATE_DRAINING, why
            self._drain_grace_s = grace_s
            if self._loop is not None:
                self._loop.drain(grace_s)
        self._tell()

    def died(self, why: str) -> None:
        with self._lock:
            self._state, self._reason = pb.STATE_DEAD, why
        self._tell()

    # What is said of it

    @property
    def state(self) -> int:
        return self._condition()[0]

    @property
    def draining_s(self) -> float | None:
        """The grace it was given, once it is draining."""
        return self._drain_grace_s

    @property
    def busy(self) -> bool:
        return self.progress.stalled_s(time.monotonic()) > 0

    def description(self) -> pb.Description:
        state, reason = self._condition()
        return pb.Description(
            protocol=PROTOCOL,
            name=self._name,
            pid=os.getpid(),
            state=state,  # type: ignore[arg-type]  # the stubs know enum numbers only as literals
            reason=reason,
            model=self._model,
            max_sequences=self._max_sequences,
        )

    def publish(self, stats: EngineStats) -> None:
        """The step loop's report, passed on to every session."""
        self._stats = stats
        self._stats_at = time.monotonic()
        payload = encode_stats(with_process(stats))
        for session in self._sessions:
            session.link.send(payload)

    def tick(self, now: float) -> None:
        """Called about each half second, outside the step loop: tells of stalls, and that the process lives."""
        self._tell()
        if now - self._stats_at >= HEARTBEAT_S * 0.9:
            self.publish(self._stats)

    # Sessions

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)

    def open(self, link: Link) -> Session:
        """A connection that has not said hello yet: it hears nothing and may ask for nothing."""
        with self._lock:
            self._numbers += 1
            return Session(self._numbers, link)

    def receive(self, session: Session, payload: bytes) -> None:
        message = parse_client_message(payload)
        kind = message.WhichOneof("body")
        if not session.client:
            if kind != "hello":
                raise WireError(f"a session starts with hello, not with {kind}")
            self._greet(session, message.hello)
        elif kind == "submit":
            loop = self._loop
            if loop is None or self._state != pb.STATE_READY:
                state, reason = self._condition()
                name = pb.State.Name(state).removeprefix("STATE_").lower()
                error = UnavailableError(f"replica {self._name} is {name}: {reason}")
                session.link.send(encode_error(message.submit.handle, error))
            else:
                loop.post(Submitted(session, message.submit))
        elif kind == "abort":
            if self._loop is not None:
                self._loop.post(Aborted(session, list(message.abort.handles)))
        elif kind == "drain":
            self.drain(message.drain.grace_s, "asked to drain by its client")
        else:
            raise WireError(f"a session does not take {kind} here")

    def close(self, session: Session) -> None:
        with self._lock:
            self._sessions = tuple(s for s in self._sessions if s is not session)
            if not self._sessions:
                self.lonely_since = time.monotonic()
        if self._loop is not None:
            self._loop.post(Ended(session))

    def _greet(self, session: Session, hello: pb.Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise WireError(f"the client speaks protocol {hello.protocol}, this side {PROTOCOL}")
        session.client = hello.client[:64] or "?"
        with self._lock:  # so that no change of state falls between the two
            session.link.send(pb.ServerMessage(description=self.description()).SerializeToString())
            self._sessions = (*self._sessions, session)
        session.link.send(encode_stats(self._stats))

    def _condition(self) -> tuple[int, str]:
        if self._state == pb.STATE_READY:
            stalled = self.progress.stalled_s(time.monotonic())
            if stalled >= self._stall_s:
                return pb.STATE_DEGRADED, "work exists but no step finishes"
        return self._state, self._reason

    def _tell(self) -> None:
        with self._lock:
            said = self._condition()
            if said == self._said:
                return
            self._said = said
            payload = pb.ServerMessage(description=self.description()).SerializeToString()
            for session in self._sessions:
                session.link.send(payload)
