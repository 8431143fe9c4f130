"""The gateway's HTTP application: which path leads to which handler."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toque.config import Settings
from toque.gateway.deployment import Deployment
from toque.gateway.gateway import Gateway
from toque.gateway.http.errors import error_body, error_headers, from_http_exception
from toque.gateway.http.exchange import Exchange, Receive, Send
from toque.gateway.http.front import Front
from toque.gateway.http.idempotent import answer_once
from toque.gateway.http.operations import Operation
from toque.gateway.http.reference import OPERATIONS, open_paths


class Endpoint:
    """A handler as an ASGI application. The route's pattern, not the path, names it in the metrics."""

    def __init__(self, operation: Operation, gateway: Gateway) -> None:
        self._pattern = operation.pattern
        self._handler = operation.handler
        self._once = operation.once
        self._gateway = gateway

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["toque.exchange"]
        exchange.endpoint = self._pattern
        if self._once:
            await answer_once(exchange, self._gateway, self._handler)
        else:
            await self._handler(exchange, self._gateway)


def create_app(deployments: dict[str, Deployment], settings: Settings) -> Starlette:
    """The application over these deployments. ``app.state.gateway`` is what the server drains."""
    gateway = Gateway(deployments, settings)
    app = Starlette(
        routes=[
            Route(operation.path, Endpoint(operation, gateway), methods=[operation.method])
            for operation in OPERATIONS
        ],
        middleware=[Middleware(Front, gateway=gateway, open_paths=open_paths(OPERATIONS))],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False  # a redirect would turn a POST into something else in some clients
    app.state.gateway = gateway
    return app


def _http_exception(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException)
    error = from_http_exception(exception)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    if exception.headers:
        headers.update(exception.headers)
    return Response(error_body(error), exception.status_code, headers, media_type="application/json")
