"""Deployments, their replicas, the controller's lease, and what gateways and controller tell each other."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployment",
        sa.Column("name", sa.String(128), primary_key=True),
        _column("reference", sa.Text),
        _column("current", sa.Text),
        _column("generation", sa.BigInteger),
        _column("observed_generation", sa.BigInteger),
        _column("stamp", sa.BigInteger),
        _column("document", sa.Text),
    )
    op.create_table(
        "replica",
        sa.Column("id", sa.String(160), primary_key=True),
        _column("deployment", sa.String(128)),
        _column("epoch", sa.BigInteger),
        _column("state", sa.String(16)),
        _column("address", sa.Text),
        _column("document", sa.Text),
    )
    op.create_table(
        "routing",
        sa.Column("name", sa.String(32), primary_key=True),
        _column("number", sa.BigInteger),
        _column("document", sa.Text),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.String(32), primary_key=True),
        _column("holder", sa.String(128)),
        _column("epoch", sa.BigInteger),
        _column("until", sa.Double),
    )
    op.create_table(
        "gateway_signal",
        sa.Column("gateway", sa.String(128), primary_key=True),
        sa.Column("deployment", sa.String(128), primary_key=True),
        _column("at", sa.Double),
        _column("document", sa.Text),
    )
    op.create_index("gateway_signal_at", "gateway_signal", ["at"])


def downgrade() -> None:
    for table in ("gateway_signal", "lease", "routing", "replica", "deployment"):
        op.drop_table(table)


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)
