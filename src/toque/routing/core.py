"""One session as its client sees it, without I/O: requests in, payloads out; payloads in, answers out."""

from __future__ import annotations

from typing import Protocol

from toque.errors import PayloadTooLargeError, ToqueError, WireError
from toque.proto import replica_pb2 as pb
from toque.proto.frames import MAX_TO_REPLICA
from toque.proto.messages import (
    PROTOCOL,
    decode_error,
    decode_stats,
    decode_step,
    encode_abort,
    encode_submit,
    parse_server_message,
)
from toque.routing.base import ReplicaState
from toque.types import EngineRequest, EngineStats, ModelCard, SequenceOutput

_STATES = {
    pb.STATE_STARTING: ReplicaState.STARTING,
    pb.STATE_READY: ReplicaState.READY,
    pb.STATE_DEGRADED: ReplicaState.DEGRADED,
    pb.STATE_DRAINING: ReplicaState.DRAINING,
    pb.STATE_DEAD: ReplicaState.DEAD,
}


class Answer(Protocol):
    """Where a request's outputs go. Nothing follows a finish reason or a failure. ``started``: an output has come."""

    started: bool

    def push(self, output: SequenceOutput) -> None: ...

    def fail(self, error: ToqueError) -> None: ...


class ClientCore:
    """Handles, open answers, and what the replica last said of itself.

    ``card`` is None until the replica has loaded its model; its name is the replica's, not a deployment's.
    """

    def __init__(self) -> None:
        self.state = ReplicaState.STARTING
        self.reason = "the replica has not answered yet"
        self.card: ModelCard | None = None
        self.max_sequences = 0
        self.pid = 0
        self.stats = EngineStats()
        self._next_handle = 1
        self._answers: dict[int, Answer] = {}
        self._request_ids: dict[int, str] = {}

    @property
    def open_answers(self) -> int:
        return len(self._answers)

    def submit(self, request: EngineRequest, answer: Answer) -> tuple[int, bytes]:
        """The request's handle and the payload to send. Raises PayloadTooLargeError if it is too big."""
        handle = self._next_handle
        payload = encode_submit(handle, request)
        if len(payload) > MAX_TO_REPLICA:
            raise PayloadTooLargeError(
                f"the request takes {len(payload)} bytes on the wire, at most {MAX_TO_REPLICA} are allowed"
            )
        self._next_handle += 1
        self._answers[handle] = answer
        self._request_ids[handle] = request.request_id
        return handle, payload

    def release(self, handle: int) -> bytes:
        """Nobody reads this answer any more. The payload to send, empty if the request had ended anyway."""
        if self._answers.pop(handle, None) is None:
            return b""
        del self._request_ids[handle]
        return encode_abort([handle])

    def receive(self, payload: bytes) -> bool:
        """Hands out what a payload carries. True if the description changed. Raises WireError."""
        message = parse_server_message(payload)
        match message.WhichOneof("body"):
            case "step":
                answers, going_on = self._answers, []
                for handle, output in zip(*decode_step(message.step, self._request_ids), strict=True):
                    answer = answers.get(handle)
                    if answer is None:
                        continue  # aborted meanwhile
                    # Readers run in the order in which they are woken: a first token does not wait while the next
                    # ones of everybody else are spelled out and sent.
                    if answer.started:
                        going_on.append((answer, output))
                    else:
                        answer.push(output)
                    if output.finish_reason is not None:
                        self._end(handle)
                for answer, output in going_on:
                    answer.push(output)
            case "stats":
                self.stats = decode_stats(message.stats)
            case "error":
                answer = self._answers.get(message.error.handle)
                if answer is not None:
                    self._end(message.error.handle)
                    answer.fail(decode_error(message.error))
            case "description":
                self._describe(message.description)
                return True
            case _:
                raise WireError("a ServerMessage without a body")
        return False

    def abort_all(self) -> bytes:
        """The payload that aborts every open answer; empty where there is none."""
        return encode_abort(list(self._answers)) if self._answers else b""

    def fail_all(self, error_of: _ErrorOf) -> None:
        """The session is over: every open answer fails with what ``error_of`` says of it."""
        answers = list(self._answers.values())
        self._answers.clear()
        self._request_ids.clear()
        for answer in answers:
            answer.fail(error_of(answer))

    def _end(self, handle: int) -> None:
        del self._answers[handle], self._request_ids[handle]

    def _describe(self, description: pb.Description) -> None:
        if description.protocol != PROTOCOL:
            raise WireError(f"the replica speaks protocol {description.protocol}, this side {PROTOCOL}")
        state = _STATES.get(description.state)
        if state is None:
            raise WireError(f"unknown replica state {description.state}")
        self.state, self.reason = state, description.reason
        self.max_sequences = description.max_sequences
        self.pid = description.pid
        if description.HasField("model"):
            model = description.model
            self.card = ModelCard(
                name=description.name,
                architecture=model.architecture,
                parameters=model.parameters,
                quantization=model.quantization,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                digest=model.digest,
            )


class _ErrorOf(Protocol):
    def __call__(self, answer: Answer, /) -> ToqueError: ...
