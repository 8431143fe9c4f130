"""``/admin/v1/usage``, ``/admin/v1/requests/{id}``, ``/admin/v1/stats``: the books, and how it goes right now.

Who calls with a key sees the usage of that key's tenant; where no keys are needed, everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from toque.errors import NotFoundError, RequestError
from toque.gateway.gateway import Gateway
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.operations import Operation
from toque.gateway.http.parameters import Parameter, read_query
from toque.monitor.cost import per_million
from toque.monitor.timeline import moments
from toque.routing.pool import ReplicaPool
from toque.types import EngineStats

if TYPE_CHECKING:
    from toque.gateway.deployment import Deployment
    from toque.monitor.ledger.database import Database
    from toque.monitor.ledger.ledger import Ledger
    from toque.monitor.ledger.usage import UsageQuery

_FILTERS = ("model", "version", "tenant", "key", "endpoint")
_MOMENT = (
    "`24h` or `7d` ago, `2026-09-01`, `2026-09-01T12:00` (UTC unless it says), or seconds since the epoch"
)
_QUERY = (
    Parameter(
        "group_by",
        "`model`, `version`, `tenant`, `key`, `endpoint`, and `hour` or `day`, comma-separated; `model` if left out, "
        "and with a `month` `tenant,key,model`.",
    ),
    Parameter("since", f"The first moment that counts: {_MOMENT}; `30d` if left out."),
    Parameter("until", f"The first moment that does not: {_MOMENT}; now if left out."),
    Parameter("month", "A calendar month such as `2026-09`, instead of `since` and `until`."),
    Parameter("format", "`json`, or `csv` for spreadsheets.", {"enum": ["json", "csv"], "default": "json"}),
    *(Parameter(name, f"Only what has this {name}.") for name in _FILTERS),
)
_CSV = [(b"content-type", b"text/csv; charset=utf-8")]


class LedgerUsage(Struct):
    """``data`` has a row per group, ``total`` their sum; amounts are decimal text in the row's ``currency``."""

    object: str
    since: str
    until: str
    group_by: list[str]
    data: list[dict[str, Any]]
    total: dict[str, Any]


class RequestsAnswer(Struct):
    object: str
    data: list[dict[str, Any]]


class StatsAnswer(Struct):
    """``latency`` by measure and window (``1m``, ``5m``, ``60m``), in seconds, within 1%."""

    object: str
    models: dict[str, dict[str, Any]]
    ledger: dict[str, Any] | None


async def usage(exchange: Exchange, gateway: Gateway) -> None:
    """Query: ``group_by`` (comma-separated), ``since``, ``until`` or ``month``, filters, ``format=csv``."""
    ledger = _ledger(gateway)
    asked = read_query(exchange, _QUERY)
    wants_csv = asked.pop("format", "json")
    if wants_csv not in ("json", "csv"):
        raise RequestError(f"format is json or csv, got {wants_csv[:20]!r}", param="format")
    if gateway.keys:
        _own_tenant_only(asked, exchange.caller.tenant)
    currency = gateway.settings.ledger.currency
    if wants_csv == "csv":
        body = await ledger.reader.ask(partial(_as_csv, asked, currency))
        await exchange.answer(200, body, list(_CSV))
    else:
        await exchange.answer(200, await ledger.reader.ask(partial(_as_json, asked, currency)))


async def requests(exchange: Exchange, gateway: Gateway) -> None:
    """The rows and the events of one request, by the id of its answer or its x-request-id."""
    ledger = _ledger(gateway)
    wanted: str = exchange.scope["path_params"]["id"]
    event_log = gateway.event_log

    def ask(database: Database) -> list[dict[str, Any]]:
        trails = {} if event_log is None else {trail.request_id: trail for trail in event_log.find(wanted)}
        rows: dict[str, dict[str, Any]] = {row["request_id"]: row for row in database.find(wanted)}
        for name, trail in trails.items():
            rows.setdefault(name, {"request_id": name, "tenant": trail.tenant})["events"] = moments(trail)
        return list(rows.values())

    rows = await ledger.reader.ask(ask)
    if gateway.keys:
        rows = [row for row in rows if row["tenant"] == exchange.caller.tenant]
    if not rows:
        raise NotFoundError(f"the ledger has no request {wanted[:80]!r} (yet)", param="id")
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": rows}))


async def stats(exchange: Exchange, gateway: Gateway) -> None:
    await exchange.answer(200, msgspec.json.encode(snapshot(gateway)))


def snapshot(gateway: Gateway) -> dict[str, Any]:
    """Everything that a live display shows: per model its latencies, its engine and its cost; and the ledger."""
    latencies = gateway.latencies.snapshot()
    replicas = gateway.replica_stats()
    models: dict[str, dict[str, Any]] = {}
    for name, deployment in gateway.deployments.items():
        models[name] = {
            "state": deployment.state,
            "reason": deployment.reason,
            "engine": deployment.client.stats(),
            "latency": latencies.get(name, {}),
            "replicas": _replicas(deployment, replicas.get(name, {})),
        }
        total = gateway.ledger.totals.get(name) if gateway.ledger is not None else None
        if total is not None:
            models[name]["since_start"] = {
                "requests": total.requests,
                "tokens": total.tokens,
                "device_seconds": total.device_ns / 1e9,
                "list_per_million_tokens": per_million(total.list_nano, total.tokens),
                "cost_per_million_tokens": per_million(total.cost_nano, total.tokens),
                "currency": gateway.settings.ledger.currency,
            }
    return {
        "object": "stats",
        "models": models,
        "ledger": None if gateway.ledger is None else gateway.ledger.status(),
    }


def _replicas(deployment: Deployment, stats: Mapping[str, EngineStats]) -> dict[str, dict[str, Any]]:
    if not isinstance(deployment.client, ReplicaPool):
        return {}
    conditions = deployment.client.replica_conditions()
    return {
        name: {"state": state.value, "reason": reason, "engine": stats.get(name, EngineStats())}
        for name, (state, reason) in sorted(conditions.items())
    }


def _ledger(gateway: Gateway) -> Ledger:
    if gateway.ledger is None:
        raise NotFoundError("this server keeps no ledger (ledger.enabled is false)")
    return gateway.ledger


def _own_tenant_only(asked: dict[str, str], tenant: str) -> None:
    if asked.setdefault("tenant", tenant) != tenant:
        raise NotFoundError(f"this key sees the usage of its own tenant, {tenant!r}", param="tenant")


def _query(asked: dict[str, str]) -> UsageQuery:
    from toque.monitor.ledger.usage import UsageQuery, month_bounds
    from toque.monitor.ledger.when import moment

    if "month" in asked and ("since" in asked or "until" in asked):
        raise RequestError("give either month or since and until", param="month")
    until: int | None
    if "month" in asked:
        since, until = month_bounds(asked["month"])
        default = "tenant,key,model"
    else:
        since = moment(asked.get("since", "30d"), param="since")
        until = moment(asked["until"], param="until") if "until" in asked else None
        default = "model"
    names = tuple(name.strip() for name in asked.get("group_by", default).split(",") if name.strip())
    return UsageQuery(names, since, until, {name: asked[name] for name in _FILTERS if name in asked})


def _as_json(asked: dict[str, str], currency: str, database: Any) -> bytes:
    from toque.monitor.ledger.usage import document
    from toque.monitor.ledger.usage import usage as ask

    return msgspec.json.encode(document(ask(database, _query(asked)), currency))


def _as_csv(asked: dict[str, str], currency: str, database: Any) -> bytes:
    from toque.monitor.ledger.usage import to_csv
    from toque.monitor.ledger.usage import usage as ask

    return to_csv(ask(database, _query(asked)), currency).encode()


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/admin/v1/usage",
        usage,
        "Usage, prices and costs from the ledger, grouped as asked.",
        answer=LedgerUsage,
        parameters=_QUERY,
        other_content=("text/csv",),
        statuses=(400, 404, 429, 503),
    ),
    Operation(
        "GET",
        "/admin/v1/requests/{id:path}",
        requests,
        "What became of one request: its row in the ledger, and its events.",
        answer=RequestsAnswer,
        statuses=(404, 429, 503),
    ),
    Operation(
        "GET",
        "/admin/v1/stats",
        stats,
        "Percentiles, engines and costs right now.",
        answer=StatsAnswer,
    ),
)
