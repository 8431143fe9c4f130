"""The two endpoints that generate."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from toque.errors import GrammarError, PayloadTooLargeError, PermissionDeniedError, RequestError
from toque.gateway.deployment import find_deployment
from toque.gateway.gateway import Gateway
from toque.gateway.http.body import check_content_type, decode, read_body
from toque.gateway.http.chat import ChatFormat
from toque.gateway.http.completions import CompletionFormat
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.openai_types import ChatCompletionBody, CompletionBody, SamplingFields
from toque.gateway.http.respond import respond
from toque.gateway.http.structure import form_field
from toque.gateway.http.translate import MAX_TIMEOUT_S, bounded, brief, chat_request, completion_request
from toque.monitor.log_format import fields

log = logging.getLogger("toque.gateway")

TOO_MANY_ITEMS = "too_many_items"


async def chat_completions(exchange: Exchange, gateway: Gateway) -> None:
    body = decode(await receive_json(exchange, gateway), ChatCompletionBody)
    body.timeout = deadline_s(exchange, body.timeout)
    body.priority = priority_of(exchange, body.priority)
    deployment = find_deployment(gateway.deployments, body.model)
    deployment.check_generates(exchange.endpoint)
    # The answer's id is new every time, so it can name the work inside too; the caller's own id may come twice.
    request = chat_request(
        body, f"chatcmpl-{uuid.uuid4().hex}", exchange.caller.tenant, gateway.settings.limits.max_choices
    )
    with _naming_the_form(body):
        await respond(exchange, gateway, deployment, request, ChatFormat)


async def completions(exchange: Exchange, gateway: Gateway) -> None:
    body = decode(await receive_json(exchange, gateway), CompletionBody)
    body.timeout = deadline_s(exchange, body.timeout)
    body.priority = priority_of(exchange, body.priority)
    deployment = find_deployment(gateway.deployments, body.model)
    deployment.check_generates(exchange.endpoint)
    request = completion_request(
        body, f"cmpl-{uuid.uuid4().hex}", exchange.caller.tenant, gateway.settings.limits.max_choices
    )
    with _naming_the_form(body):
        await respond(exchange, gateway, deployment, request, CompletionFormat)


@contextmanager
def _naming_the_form(body: SamplingFields) -> Iterator[None]:
    """The engine refuses a grammar without knowing which field it came from; the answer names it."""
    try:
        yield
    except GrammarError as error:
        if error.param is None:
            error.param = form_field(body)
        raise


def deadline_s(exchange: Exchange, timeout: float | None) -> float | None:
    """The body's ``timeout`` or the header's, whichever ends first. RequestError when one is no time."""
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout must be between 0 and {MAX_TIMEOUT_S} seconds, got {brief(timeout)}", param="timeout"
        )
    header = exchange.header(b"x-request-timeout")
    if header is None:
        return timeout
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise RequestError(
            f"the header x-request-timeout must be seconds between 0 and {MAX_TIMEOUT_S}, got {brief(header)}",
            param="x-request-timeout",
        )
    return seconds if timeout is None else min(timeout, seconds)


def priority_of(exchange: Exchange, priority: int | None) -> int:
    """Requests of higher priority go first whoever sends them, so a tenant may put its own behind, but not before
    those of others: PermissionDeniedError. RequestError when it is out of range."""
    if priority is None:
        return 0
    bounded("priority", priority, -1000, 1000)
    if priority < 0 and not exchange.caller.admin:
        raise PermissionDeniedError(
            f"priority below 0, before other tenants, needs an administrator's key; got {priority}",
            param="priority",
            code="not_an_admin",
        )
    return priority


async def receive_json(exchange: Exchange, gateway: Gateway) -> bytes:
    """The body, of bounded size and with a bounded number of values in it. PayloadTooLargeError names the bound."""
    if exchange.body is not None:
        return exchange.body
    settings = gateway.settings
    check_content_type(exchange.scope)
    body = await read_body(
        exchange.scope, exchange.receive, settings.limits.max_body_bytes, settings.server.body_timeout_s
    )
    if settings.server.log_prompts:
        log.info("body of %s", exchange.request_id, extra=fields(body=body.decode("utf-8", "replace")))
    most = settings.limits.max_body_items
    # An entry of an object costs several times an entry of a list.
    if len(body) > most and (items := body.count(b",") + 3 * body.count(b":")) > most:
        raise PayloadTooLargeError(
            f"the body holds too many values to parse beside other requests: its commas and three times its colons "
            f"may be at most {most} together, and are {items}; split the request",
            code=TOO_MANY_ITEMS,
        )
    return body
