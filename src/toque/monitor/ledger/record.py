"""What the ledger keeps of one request, as it stands in memory, in the journal and in the database."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import Struct

_VERSION = b"\x01"  # of the encoding; fields may be appended with defaults without a new one


class Outcome(StrEnum):
    OPEN = "open"
    OK = "ok"  # answered in full
    CANCELLED = "cancelled"  # the client left; what was computed until then is counted
    FAILED = "failed"  # ours or an engine's fault, a deadline, an overload after admission
    REFUSED = "refused"  # admitted, then found impossible before anything was computed (4xx)
    LOST = "lost"  # the gateway died with the request open; counts are the last that it noted down


class Attempt(Struct, array_like=True):
    """One try of a request on one replica. The client is billed for the request, not for its attempts."""

    number: int
    replica: str = ""
    started_at: int = 0  # microseconds since the epoch
    outcome: str = Outcome.OK.value
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    device_ns: int = 0
    cost_nano: int = 0
    error_code: str = ""


class UsageRecord(Struct, array_like=True):
    """One client request: a row of ``usage_event``.

    Times are whole microseconds, device time whole nanoseconds, money whole billionths of the ledger's currency, so
    that sums are exact in any order. ``prompt_tokens`` counts each prompt once however many choices answer it;
    ``cached_tokens`` is a part of it, ``reasoning_tokens`` a part of ``completion_tokens``. ``status`` is the HTTP
    status of the answer (499: the client left), 0 while open.
    """

    request_id: str
    opened_at: int
    closed_at: int = 0
    outcome: str = Outcome.OPEN.value
    status: int = 0
    client_id: str = ""  # the x-request-id that the client sent or was given
    idempotency_key: str = ""
    gateway: str = ""  # the gateway process that wrote it
    tenant: str = ""
    key_id: str = ""
    endpoint: str = ""
    model: str = ""
    version: str = ""
    replica: str = ""
    stream: bool = False
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: str = ""
    error_code: str = ""
    queue_us: int = 0
    ttft_us: int = 0  # 0: no first token
    total_us: int = 0
    device_ns: int = 0
    list_nano: int = 0
    cost_nano: int = 0
    attempts: list[Attempt] = msgspec.field(default_factory=list)

    @property
    def closed(self) -> bool:
        return self.outcome != Outcome.OPEN.value


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UsageRecord)


def encode(record: UsageRecord) -> bytes:
    return _VERSION + _encoder.encode(record)


def decode(payload: bytes | memoryview) -> UsageRecord:
    """Raises ValueError for anything that `encode` did not write."""
    if bytes(payload[:1]) != _VERSION:
        raise ValueError(f"a usage record of version {bytes(payload[:1])!r} is not known here")
    try:
        return _decoder.decode(payload[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a usage record: {error}") from None
