"""Who has signed which version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "version_signature",
        sa.Column("model", sa.String(96), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(96), nullable=False),
        sa.Column("signed_by", sa.String(128), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["model", "version"], ["model_version.model", "model_version.version"]),
    )


def downgrade() -> None:
    op.drop_table("version_signature")
