"""One request's life as a list of moments: what `toque logs` shows, and what spans are made of."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import Struct

from toque.types import StepEvent, StepEventKind

MAX_EVENTS = 512  # of one request; many choices with many chunks are cut, the end is always told
_MAX_NOTE, _SHORT_NOTE = 200, 40  # characters; of the first hundred moments, and of the others
_VERSION = b"\x01"  # of the encoding; fields may be appended with defaults without a new one


class TrailKind(StrEnum):
    ADMITTED = "admitted"
    PREPARED = "prepared"  # its text is tokens now
    HELD = "held"  # waits for a replica that comes up
    ROUTED = "routed"
    RETRIED = "retried"
    MIGRATED = "migrated"
    HEDGED = "hedged"  # sent to a second replica besides the first
    WON = "won"  # which of the two goes on
    SCHEDULED = "scheduled"  # the engine gave it a place
    PREFILL = "prefill"
    PREEMPTED = "preempted"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"  # one choice
    CLOSED = "closed"  # the answer is whole, or never will be; its row is in the ledger


ROUTES = (TrailKind.ROUTED, TrailKind.RETRIED, TrailKind.MIGRATED, TrailKind.HEDGED)
_STEP_KINDS = {
    StepEventKind.SCHEDULED: TrailKind.SCHEDULED.value,
    StepEventKind.PREFILL: TrailKind.PREFILL.value,
    StepEventKind.PREEMPTED: TrailKind.PREEMPTED.value,
}


class Moment(Struct, array_like=True):
    """``at_us`` microseconds after the request was opened. ``note``: a replica, a reason, how it ended."""

    at_us: int
    kind: str
    choice: int = 0
    tokens: int = 0
    step: int = 0
    note: str = ""


class Trail(Struct, array_like=True):
    """The moments of one request, as they were noted; `ordered` has them by time. No text of anybody's is in it.

    ``opened_at`` is in microseconds since the epoch. ``trace_id``, ``span_id`` and ``parent_id`` are hex, "" where
    there is no trace.
    """

    request_id: str
    opened_at: int
    client_id: str = ""
    tenant: str = ""
    endpoint: str = ""
    model: str = ""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    moments: list[Moment] = msgspec.field(default_factory=list)
    dropped: int = 0

    def note(
        self, at_us: int, kind: TrailKind, choice: int = 0, tokens: int = 0, step: int = 0, note: str = ""
    ) -> None:
        if len(self.moments) < MAX_EVENTS or kind is TrailKind.CLOSED:
            most = _MAX_NOTE if len(self.moments) < 100 else _SHORT_NOTE
            self.moments.append(Moment(max(0, at_us), kind.value, choice, tokens, step, note[:most]))
        else:
            self.dropped += 1

    def stepped(self, since_us: int, choice: int, events: list[StepEvent]) -> None:
        """What an engine told, which had got the choice ``since_us`` microseconds after the request was opened."""
        room = MAX_EVENTS - len(self.moments)
        self.dropped += max(0, len(events) - room)
        self.moments += [
            Moment(since_us + event.at_us, _STEP_KINDS[event.kind], choice, event.tokens, event.step)
            for event in events[: max(0, room)]
        ]

    def ordered(self) -> list[Moment]:
        return sorted(self.moments, key=lambda moment: moment.at_us)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trail)


def encode(trail: Trail) -> bytes:
    return _VERSION + _encoder.encode(trail)


def decode(payload: bytes | memoryview) -> Trail:
    """Raises ValueError for anything that `encode` did not write."""
    if bytes(payload[:1]) != _VERSION:
        raise ValueError(f"a trail of version {bytes(payload[:1])!r} is not known here")
    try:
        return _decoder.decode(payload[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a trail: {error}") from None
