"""Who may change what the server runs."""

from __future__ import annotations

from toque.errors import PermissionDeniedError
from toque.gateway.http.exchange import Exchange


def check_admin(exchange: Exchange) -> None:
    """PermissionDeniedError for a tenant's key, which asks models and sees its own usage, and no more."""
    if not exchange.caller.admin:
        raise PermissionDeniedError(
            "this key may not administer the server: use one of auth.api_keys, or one made with "
            "`toque keys create TENANT --admin`",
            code="not_an_admin",
        )
