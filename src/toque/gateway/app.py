"""The gateway's HTTP application: which path leads to which handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
from toque.gateway.http import generate, models, ops, tokens
from toque.gateway.http.errors import error_body, error_headers, from_http_exception
from toque.gateway.http.exchange import Exchange, Receive, Send
from toque.gateway.http.front import Front

Handler = Callable[[Exchange, Gateway], Awaitable[None]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", generate.chat_completions),
    ("POST", "/v1/completions", generate.completions),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{id:path}", models.show_model),
    ("POST", "/tokenize", tokens.tokenize_text),
    ("POST", "/detokenize", tokens.detokenize_ids),
    ("GET", "/live", ops.live),
    ("GET", "/ready", ops.ready),
    ("GET", "/health", ops.health),
    ("GET", "/metrics", ops.metrics),
)

# Everything else needs a key when there are keys; these answer orchestrators that have none.
OPEN_PATHS = frozenset({"/live", "/ready", "/health"})


class Endpoint:
    """A handler as an ASGI application. The route's pattern, not the path, names it in the metrics."""

    def __init__(self, pattern: str, handler: Handler, gateway: Gateway) -> None:
        self._pattern = pattern.replace(":path", "")
        self._handler = handler
        self._gateway = gateway

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["toque.exchange"]
        exchange.endpoint = self._pattern
        await self._handler(exchange, self._gateway)


def create_app(deployments: Mapping[str, Deployment], settings: Settings) -> Starlette:
    """The application over these deployments. ``app.state.gateway`` is what the server drains."""
    gateway = Gateway(deployments, settings)
    app = Starlette(
        routes=[
            Route(pattern, Endpoint(pattern, handler, gateway), methods=[method])
            for method, pattern, handler in ROUTES
        ],
        middleware=[Middleware(Front, gateway=gateway, open_paths=OPEN_PATHS)],
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
