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
    from toque.monitor.spans import Value


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
            version="" if (profile := deployment.profile) is None else profile.version,
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
    event_log, trace = gateway.event_log, exchange.trace
    sender = gateway.spans if trace is not None and trace.sampled else None
    if event_log is None and sender is None:
        return None, None
    exchange.spans_follow = True
    opened_at = int(time.time() * 1e6) if entry is None else entry.record.opened_at
    trail = Trail(
        request.request_id,
        opened_at,
        exchange.request_id,
        exchange.caller.tenant,
        exchange.endpoint,
        exchange.model,
    )
    if trace is not None:
        trail.trace_id, trail.span_id, trail.parent_id = trace.trace_id, trace.span_id, trace.parent_id
    if event_log is not None:
        event_log.open(trail)

    def closed(trail: Trail, row: UsageRecord) -> None:
        if event_log is not None:
            event_log.close(trail)
        if sender is not None and trace is not None:
            sender.send(trail, row, trace, _asked(request))

    return trail, closed


def _asked(request: GenerationRequest) -> dict[str, Value]:
    """What was asked for, under the names that OpenTelemetry has for it. Never a text."""
    sampling = request.sampling
    known: dict[str, Value | None] = {
        "gen_ai.request.choice.count": request.choices if request.choices > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens or None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": request.stream or None,
    }
    return {name: value for name, value in known.items() if value is not None}
