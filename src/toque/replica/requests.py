"""Which request of the engine belongs to which session, and what each message does to it. No I/O, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toque.errors import EngineError, PayloadTooLargeError, QueueFullError, ToqueError
from toque.proto import replica_pb2 as pb
from toque.proto.frames import MAX_TO_CLIENT
from toque.proto.messages import decode_submit, encode_error, encode_step
from toque.types import EngineRequest, EngineStats, SequenceOutput


class Engine(Protocol):
    """What a replica needs of an engine. Used from one thread."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> object: ...

    def step(self) -> list[SequenceOutput]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class Link(Protocol):
    """The way back to one client. Sending never blocks and never raises; any thread may send."""

    def send(self, payload: bytes) -> None: ...


@dataclass(eq=False, slots=True)
class Session:
    """One client's use of the replica. ``keys`` (handle to the engine's request id) is the step loop's alone."""

    number: int
    link: Link
    client: str = ""  # empty until it has said hello
    keys: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submitted:
    session: Session
    message: pb.Submit


@dataclass(frozen=True, slots=True)
class Aborted:
    session: Session
    handles: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over: its requests end, and nobody hears of it."""

    session: Session


Command = Submitted | Aborted | Ended


class RequestTable:
    """The open requests of one engine.

    Every accepted request ends in exactly one of: an output with a finish reason, a RequestError, its abort. What the
    engine refuses, or fails at, is told to the request concerned only.
    """

    def __init__(self, engine: Engine, *, max_requests: int) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._routes: dict[str, tuple[Session, int]] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def apply(self, command: Command) -> None:
        match command:
            case Submitted(session, message):
                try:
                    self._submit(session, message)
                except ToqueError as error:
                    session.link.send(encode_error(message.handle, error))
            case Aborted(session, handles):
                for handle in handles:
                    self._abort(session, handle)
            case Ended(session):
                for handle in list(session.keys):
                    self._abort(session, handle)

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Sends one step's outputs: one message for each session concerned."""
        columns: dict[Session, tuple[list[int], list[SequenceOutput]]] = {}
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue  # aborted meanwhile
            session, handle = route
            column = columns.get(session)
            if column is None:
                column = columns[session] = ([], [])
            column[0].append(handle)
            column[1].append(output)
            if output.finish_reason is not None:
                del self._routes[output.request_id], session.keys[handle]
        for session, (handles, rows) in columns.items():
            payload = encode_step(handles, rows)
            if len(payload) <= MAX_TO_CLIENT:
                session.link.send(payload)
            else:
                self._deliver_apart(session, handles, rows)

    def fail_all(self, error: ToqueError) -> None:
        for session, handle in list(self._routes.values()):
            self._abort(session, handle)
            session.link.send(encode_error(handle, error))

    def _submit(self, session: Session, message: pb.Submit) -> None:
        handle = message.handle
        if handle in session.keys:
            raise EngineError(f"handle {handle} is in use in this session")
        if len(self._routes) >= self._max_requests:
            raise QueueFullError(f"this replica holds {self._max_requests} requests, the most it takes")
        key = f"{session.number}.{handle}"  # unique here, whatever request ids several clients choose
        self._engine.add(decode_submit(message, key))
        session.keys[handle] = key
        self._routes[key] = (session, handle)

    def _abort(self, session: Session, handle: int) -> None:
        key = session.keys.pop(handle, None)
        if key is not None:
            del self._routes[key]
            self._engine.abort(key)

    def _deliver_apart(self, session: Session, handles: list[int], rows: list[SequenceOutput]) -> None:
        for handle, row in zip(handles, rows, strict=True):
            payload = encode_step([handle], [row])
            if len(payload) > MAX_TO_CLIENT:
                self._abort(session, handle)
                error = PayloadTooLargeError(
                    f"one step's logprobs take {len(payload)} bytes, at most {MAX_TO_CLIENT} are allowed",
                    param="prompt_logprobs",
                )
                payload = encode_error(handle, error)
            session.link.send(payload)
