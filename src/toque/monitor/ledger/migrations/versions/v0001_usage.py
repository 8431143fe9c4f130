"""Usage events, attempts, and their sums by hour and day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_MEASURES = (
    "requests ok cancelled failed refused lost choices prompt_tokens cached_tokens completion_tokens reasoning_tokens "
    "queue_us ttft_us total_us device_ns list_nano cost_nano"
).split()


def upgrade() -> None:
    op.create_table(
        "usage_event",
        sa.Column("request_id", sa.String(160), primary_key=True),
        _number("opened_at"),
        _number("closed_at"),
        _text("outcome", 16),
        sa.Column("status", sa.Integer, nullable=False),
        _text("client_id", 160),
        _text("idempotency_key", 256),
        _text("gateway", 64),
        _text("tenant", 128),
        _text("key_id", 128),
        _text("endpoint", 64),
        _text("model", 256),
        _text("version", 256),
        _text("replica", 128),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("choices", sa.Integer, nullable=False),
        *(_number(name) for name in (*_COUNTS, "reasoning_tokens")),
        _text("finish_reason", 32),
        _text("error_code", 64),
        *(
            _number(name)
            for name in ("queue_us", "ttft_us", "total_us", "device_ns", "list_nano", "cost_nano")
        ),
    )
    op.create_index("usage_event_closed_at", "usage_event", ["closed_at"])
    op.create_index("usage_event_client_id", "usage_event", ["client_id"])
    still_open = sa.text("outcome = 'open'")
    op.create_index(
        "usage_event_open", "usage_event", ["gateway"], sqlite_where=still_open, postgresql_where=still_open
    )
    op.create_table(
        "usage_attempt",
        sa.Column("request_id", sa.String(160), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        _text("replica", 128),
        _number("started_at"),
        _text("outcome", 16),
        *(_number(name) for name in (*_COUNTS, "device_ns", "cost_nano")),
        _text("error_code", 64),
    )
    for table in ("usage_hour", "usage_day"):
        op.create_table(
            table,
            sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("tenant", sa.String(128), primary_key=True),
            sa.Column("key_id", sa.String(128), primary_key=True),
            sa.Column("model", sa.String(256), primary_key=True),
            sa.Column("version", sa.String(256), primary_key=True),
            sa.Column("endpoint", sa.String(64), primary_key=True),
            *(_number(name) for name in _MEASURES),
            sqlite_with_rowid=False,
        )


def downgrade() -> None:
    for table in ("usage_day", "usage_hour", "usage_attempt", "usage_event"):
        op.drop_table(table)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)
