"""One HTTP request and its answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toque.errors import PayloadTooLargeError, ToqueError
from toque.gateway.auth import Caller
from toque.gateway.http.errors import error_body, error_headers
from toque.gateway.quota import Allowance, Charge, Quota

if TYPE_CHECKING:
    from toque.gateway.http.idempotent import Recording
    from toque.monitor.trace_context import TraceContext

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LAST_WORD_S = 2.0
MODEL_VERSION = b"x-toque-model-version"
WAITING = b": waiting\n\n"  # a comment that keeps a silent stream's connection alive
NOBODY = Caller("", "", Quota(Allowance()))  # who asks at the paths that need no key
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would hold every token back
]


class Exchange:
    """What a handler reads from and writes to.

    Every answer leaves through ``send``, which adds the headers that all answers carry. ``status`` is what the
    metrics and the log say in the end: the status line, or for a stream that broke, the error's status. ``failure``
    is that error's code. ``spans_follow`` is set once somebody else tells the trace of this request. ``body`` is the
    request's, where somebody has read it already; ``recording`` keeps an answer that may be asked for again.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.arrived = time.perf_counter()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = self._read_request_id()
        self.caller = NOBODY
        self.endpoint = "other"
        self.model = ""
        self.status = 0
        self.started = False
        self.failure = ""
        self.trace: TraceContext | None = None
        self.spans_follow = False
        self.body: bytes | None = None
        self.recording: Recording | None = None
        self.added: Headers = [(b"x-request-id", self.request_id.encode())]

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def charge(self, tokens: int) -> Charge:
        """The caller's leave to have about so many tokens computed, and the headers that say what is left."""
        quota = self.caller.quota
        try:
            return quota.enter(tokens)
        finally:
            self.added += quota.headers()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self.added]}
        await self._send(message)

    async def answer(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = headers or [_JSON]
        if self.recording is not None and status == 200:
            self.recording.add(body)
            await self._keep(headers)
        await self.send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: ToqueError) -> None:
        """The error as the whole answer, or as the last event of a stream that has begun."""
        self.recording = None
        self.failure = error.error_code or type(error).type
        if self.started:
            self.status = error.status
            # A client that does not read would keep us here; returning unfinished closes its connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self.write(b"data: " + error_body(error) + b"\n\n")
                    await self.finish()
        elif error.error_code == PayloadTooLargeError.code:  # found while the body was arriving
            await self._answer_before_the_rest(error)
        else:
            await self.answer(error.status, error_body(error), [_JSON, *error_headers(error)])

    async def _answer_before_the_rest(self, error: ToqueError) -> None:
        """The answer at once, and then a while of reading what is left of the body.

        A connection that is closed on data nobody has read is reset, and with it the answer that is on its way.
        """
        body = error_body(error)
        length = (b"content-length", str(len(body)).encode())
        headers = [length, _JSON, *error_headers(error)]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError, asyncio.CancelledError):  # a server that stops need not read on
            async with asyncio.timeout(LAST_WORD_S):
                while (message := await self.receive())["type"] == "http.request" and message.get(
                    "more_body"
                ):
                    pass
        await self.finish()

    async def start_events(self) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})

    async def write(self, data: bytes) -> None:
        if self.recording is not None and data != WAITING:
            self.recording.add(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """The last bytes of a stream."""
        if self.recording is not None:
            self.recording.add(data)
            await self._keep(_EVENTS)
        await self._send({"type": "http.response.body", "body": data})

    async def _keep(self, headers: Headers) -> None:
        """The whole answer is known: it is kept before its last bytes leave."""
        recording, self.recording = self.recording, None
        if recording is not None:
            version = next((value for name, value in self.added if name == MODEL_VERSION), b"")
            kind = next(value for name, value in headers if name == b"content-type")
            await recording.keep(kind, self.model, version)

    def _read_request_id(self) -> str:
        """The caller's id when it is a plain one (it goes into logs and headers), else a new one."""
        given = self.header(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given
        return new_request_id()


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"
