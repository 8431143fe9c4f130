"""The ledger's tables. Money is in billionths of the currency, device time in nanoseconds: integers add up."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, String, Table, text

metadata = MetaData()

# What a roll-up is kept apart by, besides the hour or day.
GROUPS = ("tenant", "key_id", "model", "version", "endpoint")
COUNTED = ("ok", "cancelled", "failed", "refused", "lost")
SUMMED = (
    "choices",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "queue_us",
    "ttft_us",
    "total_us",
    "device_ns",
    "list_nano",
    "cost_nano",
)
MEASURES = ("requests", *COUNTED, *SUMMED)

_OPEN = text("outcome = 'open'")

usage_event = Table(
    "usage_event",
    metadata,
    Column("request_id", String(160), primary_key=True),
    Column("opened_at", BigInteger, nullable=False),  # microseconds since the epoch
    Column("closed_at", BigInteger, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("status", Integer, nullable=False),
    Column("client_id", String(160), nullable=False),
    Column("idempotency_key", String(256), nullable=False),
    Column("gateway", String(64), nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("key_id", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(256), nullable=False),
    Column("version", String(256), nullable=False),
    Column("replica", String(128), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("choices", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("error_code", String(64), nullable=False),
    Column("queue_us", BigInteger, nullable=False),
    Column("ttft_us", BigInteger, nullable=False),
    Column("total_us", BigInteger, nullable=False),
    Column("device_ns", BigInteger, nullable=False),
    Column("list_nano", BigInteger, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Index("usage_event_closed_at", "closed_at"),
    Index("usage_event_client_id", "client_id"),
    Index("usage_event_open", "gateway", sqlite_where=_OPEN, postgresql_where=_OPEN),
)

usage_attempt = Table(
    "usage_attempt",
    metadata,
    Column("request_id", String(160), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("replica", String(128), nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("device_ns", BigInteger, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Column("error_code", String(64), nullable=False),
)


@dataclass(frozen=True, slots=True)
class Rollup:
    """Requests added up by periods of ``seconds`` and by ``groups``, which with the period are the table's key."""

    table: Table
    seconds: int
    groups: tuple[str, ...]


def _rollup(name: str, seconds: int, groups: tuple[str, ...] = GROUPS) -> Rollup:
    table = Table(
        name,
        metadata,
        # When the period begins, in seconds since the epoch.
        Column("bucket", BigInteger, primary_key=True, autoincrement=False),
        *(Column(group, String(_LENGTHS[group]), primary_key=True) for group in groups),
        *(Column(measure, BigInteger, nullable=False) for measure in MEASURES),
        sqlite_with_rowid=False,  # rows lie in the order of their buckets: a month is read in one go
    )
    return Rollup(table, seconds, groups)


_LENGTHS = {"tenant": 128, "key_id": 128, "model": 256, "version": 256, "endpoint": 64}
HOURS = _rollup("usage_hour", 3_600)
DAYS = _rollup("usage_day", 86_400)
# Where models, versions and endpoints are many, a key's hours are several times fewer rows than HOURS.
KEY_HOURS = _rollup("usage_key_hour", 3_600, ("key_id", "tenant"))
ROLLUPS = (HOURS, KEY_HOURS, DAYS)
