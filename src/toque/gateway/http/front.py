"""The outermost layer: request ids, CORS, keys, and the promise that every request is answered and counted once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from toque.errors import EngineError, PermissionDeniedError, ToqueError, UnavailableError
from toque.gateway.gateway import Gateway
from toque.gateway.http.body import ClientLeft
from toque.gateway.http.exchange import Exchange, Headers, Receive, Send
from toque.gateway.listen import LOOPBACK
from toque.monitor.log_format import answering, fields
from toque.monitor.spans import OPERATIONS, Refusal
from toque.monitor.trace_context import TraceContext, trace_of

log = logging.getLogger("toque.gateway")

CLIENT_LEFT = 499
_LIMIT_HEADERS = [
    b"x-ratelimit-%b-%b" % (a, b)
    for b in (b"requests", b"tokens")
    for a in (b"limit", b"remaining", b"reset")
]
_EXPOSED = b", ".join(
    [
        b"x-request-id",
        b"x-toque-model-version",
        b"idempotent-replayed",
        b"retry-after",
        b"x-should-retry",
        *_LIMIT_HEADERS,
    ]
)


class Front:
    """ASGI middleware around the router.

    Whatever a handler raises becomes one OpenAI-shaped answer (or the last event of its stream): a ToqueError with
    its own status, anything else with 500 and a line in the log that carries the request id.
    """

    def __init__(self, app: Any, gateway: Gateway, open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths  # these need no key
        self._gateway = gateway
        server = gateway.settings.server
        self._origins = frozenset(server.cors_origins)
        self._local = server.host in LOOPBACK
        self._hosts = frozenset({*LOOPBACK, *(host.lower() for host in server.allowed_hosts)})

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        scope["toque.exchange"] = exchange
        self._trace(exchange)
        about = answering.set((exchange.request_id, exchange.trace.trace_id if exchange.trace else ""))
        if self._gateway.draining:
            exchange.added.append((b"connection", b"close"))
        try:
            await self._answer(exchange)
        finally:
            self._gateway.metrics.answered(exchange.endpoint, exchange.status)
            if exchange.trace is not None and exchange.status >= 400 and not exchange.spans_follow:
                self._tell_refusal(exchange, exchange.trace)
            if log.isEnabledFor(logging.INFO):
                _log(exchange)
            answering.reset(about)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            if self._is_preflight(exchange):
                self._check_host(exchange)
                await exchange.answer(204, b"", self._preflight(exchange))
                return
            self._check_host(exchange)
            exchange.added += self._cors(exchange)
            if exchange.scope["path"] not in self._open_paths:
                exchange.caller = self._gateway.keys.caller(exchange.header(b"authorization"))
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except ToqueError as error:
            if error.status >= 500 and not isinstance(error, UnavailableError):
                log.error("request %s failed: %s", exchange.request_id, error)
            await exchange.fail(error)
        except ClientLeft:
            exchange.status, exchange.failure = CLIENT_LEFT, "client_closed_request"
        except asyncio.CancelledError:
            # The server's grace is over: the client learns it. Nothing outside this task waits for its cancellation.
            exchange.status = UnavailableError.status
            await exchange.fail(
                UnavailableError("the server is stopping and this request did not finish in time")
            )
        except Exception:
            log.exception("request %s failed unexpectedly", exchange.request_id)
            await exchange.fail(EngineError(f"internal error; the log has it under {exchange.request_id}"))

    def _trace(self, exchange: Exchange) -> None:
        """Join the caller's trace, or begin one where spans are recorded."""
        given = exchange.header(b"traceparent")
        settings = self._gateway.settings.tracing
        if given is None and not settings.endpoint:
            return
        exchange.trace = trace = trace_of(given, exchange.header(b"tracestate"), settings.sample_ratio)
        if settings.endpoint:
            exchange.added.append((b"traceparent", trace.traceparent.encode()))

    def _tell_refusal(self, exchange: Exchange, trace: TraceContext) -> None:
        """A span for a request of a model that was answered with an error before it was admitted."""
        spans, path = self._gateway.spans, exchange.scope["path"]
        if spans is None or not trace.sampled or path not in OPERATIONS or exchange.scope["method"] != "POST":
            return
        now_ns = time.time_ns()
        spans.refused(
            Refusal(
                path,
                exchange.status,
                exchange.failure,
                exchange.request_id,
                now_ns - int((time.perf_counter() - exchange.arrived) * 1e9),
                now_ns,
                exchange.model,
                exchange.caller.tenant,
            ),
            trace,
        )

    def _check_host(self, exchange: Exchange) -> None:
        """Where nothing but being on this machine lets a caller in, its browser must know that it talks to it.

        Any web page can make a name of its own point to 127.0.0.1 (DNS rebinding), but not send another name.
        """
        if not self._local or self._gateway.keys:
            return
        given = exchange.header(b"host")
        if given is None:  # no browser
            return
        host = given.strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.rstrip(".") not in self._hosts and not name.endswith(".localhost"):
            raise PermissionDeniedError(
                f"this server has no keys and so answers to localhost only, not to {given[:80]!r}; "
                "add the name to server.allowed_hosts, or create a key",
                code="host_not_allowed",
            )

    def _is_preflight(self, exchange: Exchange) -> bool:
        return (
            exchange.scope["method"] == "OPTIONS"
            and b"origin" in exchange.headers
            and b"access-control-request-method" in exchange.headers
        )

    def _cors(self, exchange: Exchange) -> Headers:
        origin = exchange.headers.get(b"origin")
        if origin is None or not self._origins:
            return []
        headers: Headers = [(b"vary", b"Origin")]
        if "*" in self._origins or origin.decode("latin-1") in self._origins:
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        return headers

    def _preflight(self, exchange: Exchange) -> Headers:
        """What a browser asks before it sends a request; it asks without a key."""
        allowed = self._cors(exchange)
        if len(allowed) > 1:
            wanted = exchange.headers.get(b"access-control-request-headers", b"authorization, content-type")
            allowed += [
                (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
                (b"access-control-allow-headers", wanted[:1024]),
                (b"access-control-max-age", b"600"),
            ]
        return allowed


def _log(exchange: Exchange) -> None:
    method, seconds = exchange.scope["method"], time.perf_counter() - exchange.arrived
    log.info(
        "%s %s %d %.1fms id=%s model=%s",
        method,
        exchange.endpoint,
        exchange.status,
        seconds * 1e3,
        exchange.request_id,
        exchange.model or "-",
        extra=fields(
            method=method,
            endpoint=exchange.endpoint,
            status=exchange.status,
            seconds=round(seconds, 6),
            model=exchange.model,
            tenant=exchange.caller.tenant,
        ),
    )
