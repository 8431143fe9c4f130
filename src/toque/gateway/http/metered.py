"""A request's measurements, from its admission to its end, whatever that is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toque.errors import BudgetError, DeadlineError, UnavailableError
from toque.gateway.deployment import Deployment
from toque.gateway.gateway import Gateway
from toque.gateway.http.body import ClientLeft
from toque.gateway.http.exchange import Exchange
from toque.gateway.requests import GenerationRequest
from toque.monitor.metering import Meter
from toque.monitor.spend import WARNING_HEADER
from toque.monitor.trail import Trail

if TYPE_CHECKING:
    from toque.monitor.ledger.ledger import Entry
    from toque.monitor.ledger.record import UsageRecord


def check_budget(exchange: Exchange, gateway: Gateway) -> None:
    """Refuse a caller who has spent the month's budget; warn, in a header, one who is about to."""
    if gateway.ledger is None or not gateway.ledger.spend.wanted:
        return
    decision = gateway.ledger.spend.decide(exchange.caller.tenant, exchange.caller.key_id)
    if not decision.allowed:
        raise BudgetError(f"{decision.warning} for this month", retry_after_s=decision.retry_after_s)
    if decision.warning:
        exchange.added.append((WARNING_HEADER, decision.warning.encode("latin-1", "replace")))


@contextmanager
def metered(
    exchange: Exchange, gateway: Gateway, deployment: Deployment, request: GenerationRequest
) -> Iterator[Meter]:
    """Opens the ledger's row of an admitted request. Inside, `Meter.completed` closes it; any other way out does, too.

    What is refused before its admission has no row: it cost nothing and is counted in the metrics.
    """
    entry = None
    if gateway.ledger is not None:
        entry = gateway.ledger.open(
            request.request_id,
            endpoint=exchange.endpoint,
            model=deployment.name,
            version=deployment.version,
            tenant=exchange.caller.tenant,
            key_id=exchange.caller.key_id,
            client_id=exchange.request_id,
            idempotency_key=(exchange.header(b"idempotency-key") or "")[:255],
            stream=request.stream,
            choices=request.choices,
            arrived=exchange.arrived,
        )
    trail, on_close = _trail(exchange, gateway, request, entry)
    meter = Meter(
        gateway.metrics, gateway.latencies, deployment.name, exchange.arrived, entry, trail, on_close
    )
    try:
        yield meter
    except ClientLeft as error:
        meter.ended(error, client_left=True)
        raise
    except asyncio.CancelledError:
        meter.ended(UnavailableError("the server stopped"))
        raise
    except TimeoutError:
        meter.ended(DeadlineError("the request ran out of time"))
        raise
    except BaseException as error:
        meter.ended(error)
        raise
    meter.ended(None)


def _trail(
    exchange: Exchange, gateway: Gateway, request: GenerationRequest, entry: Entry | None
) -> tuple[Trail | None, Callable[[Trail, UsageRecord], None] | None]:
    """What the request's moments are noted in, and who gets it in the end; nothing where nobody does."""
    event_log = gateway.event_log
    if event_log is None:
        return None, None
    opened_at = int(time.time() * 1e6) if entry is None else entry.record.opened_at
    trail = Trail(
        request.request_id,
        opened_at,
        exchange.request_id,
        exchange.caller.tenant,
        exchange.endpoint,
        exchange.model,
    )
    if exchange.trace is not None:
        trace = exchange.trace
        trail.trace_id, trail.span_id, trail.parent_id = trace.trace_id, trace.span_id, trace.parent_id
    event_log.open(trail)

    def closed(trail: Trail, row: UsageRecord) -> None:
        event_log.close(trail)

    return trail, closed
