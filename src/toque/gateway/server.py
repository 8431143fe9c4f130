"""The HTTP server around the application: uvicorn with bounds on headers, and a drain that loses nothing.

::

    SIGTERM ─▶ draining: /ready says 503, every answer says "connection: close"
            ─▶ up to a second for idle keep-alive connections to come by and hear it
            ─▶ listener closed; open requests have `grace_s` to finish
            ─▶ what is left ends in an error event ─▶ exit code 0
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from toque.errors import RequestError
from toque.gateway.gateway import Gateway
from toque.gateway.http.errors import error_body
from toque.gateway.http.exchange import new_request_id
from toque.gateway.polling import POLL_S, wait_until

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from toque.config import ServerSettings

NOTICE_S = 1.0


class GatewayServer(uvicorn.Server):
    """uvicorn, with a drain of our own and signals that end in exit code 0."""

    def __init__(self, app: Starlette, settings: ServerSettings, max_header_bytes: int) -> None:
        class Protocol(BoundedProtocol):
            header_limit = max_header_bytes
            header_timeout_s = settings.header_timeout_s

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(settings.keep_alive_s),
                timeout_graceful_shutdown=2,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._grace_s = settings.grace_s
        self._drain_task: asyncio.Task[None] | None = None
        self._hurried = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in signals:
                loop.add_signal_handler(number, self.stop)
        except (ValueError, RuntimeError):
            yield  # not the main thread: whoever started this stops it
            return
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin the drain; a second call does not wait for anybody."""
        if self._drain_task is None:
            self._gateway.draining = True
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._hurried = True

    async def _drain(self) -> None:
        await wait_until(lambda: not self._idle_connections(), min(NOTICE_S, self._grace_s))
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await wait_until(lambda: not self.server_state.tasks or self._hurried, self._grace_s)
        left = list(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
            await asyncio.sleep(POLL_S)  # for the last events to leave the buffers
        self.should_exit = True

    def _idle_connections(self) -> bool:
        return any(
            getattr(connection, "cycle", None) is None or connection.cycle.response_complete  # type: ignore[union-attr]
            for connection in self.server_state.connections
        )


class BoundedProtocol(HttpToolsProtocol):
    """Headers of bounded size that arrive in bounded time, and refusals in the shape of every other error."""

    header_limit = 64 * 2**10
    header_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = False
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing():
            self._stop_timer()
        elif self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.header_limit:
                self._refuse(
                    431, f"the headers may have at most {self.header_limit} bytes", "headers_too_large"
                )
            elif self._header_timer is None:
                self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._headers_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._refuse(
                408, f"the headers did not arrive within {self.header_timeout_s:g} s", "header_timeout"
            )
        else:
            self.transport.close()  # connected, and never said a word

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer outside the application, unless an answer is being written: that one is cut instead."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(RequestError(message, code=code))
            head = b"content-type: application/json\r\nconnection: close\r\nx-request-id: "
            length = b"\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + new_request_id().encode() + length + body)
        self.transport.close()
