"""The sums by hour of each key, whatever the model: a few rows an hour where ``usage_hour`` may have hundreds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_MEASURES = (
    "requests ok cancelled failed refused lost choices prompt_tokens cached_tokens completion_tokens reasoning_tokens "
    "queue_us ttft_us total_us device_ns list_nano cost_nano"
).split()


def upgrade() -> None:
    op.create_table(
        "usage_key_hour",
        sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.String(128), primary_key=True),
        sa.Column("tenant", sa.String(128), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _MEASURES),
        sqlite_with_rowid=False,
    )
    # What was counted so far. PostgreSQL's sums of bigint are numeric, and are cast by being stored.
    measures = ", ".join(_MEASURES)
    sums = ", ".join(f"sum({name})" for name in _MEASURES)
    op.execute(
        f"INSERT INTO usage_key_hour (bucket, key_id, tenant, {measures}) "
        f"SELECT bucket, key_id, tenant, {sums} FROM usage_hour GROUP BY bucket, key_id, tenant"
    )


def downgrade() -> None:
    op.drop_table("usage_key_hour")
