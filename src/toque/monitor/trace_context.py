"""W3C Trace Context: whose trace a request belongs to, and whether it is recorded. No library is needed for that."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

# https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags; later versions may append.
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """``span_id`` is this server's span of the request, ``parent_id`` the caller's ("": the trace begins here)."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def trace_of(traceparent: str | None, tracestate: str | None, ratio: float) -> TraceContext:
    """The caller's trace where it names one, with the caller's decision; else a new one, sampled by ``ratio``.

    A header that does not parse counts as none, as the standard says.
    """
    span_id = _id(8)
    if traceparent is not None:
        found = _PARENT.fullmatch(traceparent.strip())
        if found is not None:
            version, trace_id, parent_id, flags, more = found.groups()
            if (
                version != "ff"
                and not (version == "00" and more)
                and trace_id.strip("0")
                and parent_id.strip("0")
            ):
                state = tracestate if tracestate is not None and _STATE.fullmatch(tracestate) else ""
                return TraceContext(trace_id, span_id, parent_id, bool(int(flags, 16) & _SAMPLED), state)
    trace_id = _id(16)
    # By the id, so that servers with the same ratio agree; the low half of it is random in every generator.
    return TraceContext(trace_id, span_id, sampled=int(trace_id[16:], 16) < ratio * 2**64)


def _id(size: int) -> str:
    while not (made := secrets.token_hex(size)).strip("0"):
        pass
    return made
