"""Models, their versions, aliases, and where versions come from."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "model",
        sa.Column("name", sa.String(96), primary_key=True),
        _column("description", sa.Text),
        _column("tags", sa.JSON),
        _column("created_at", sa.BigInteger),
    )
    op.create_table(
        "model_version",
        sa.Column("model", sa.String(96), sa.ForeignKey("model.name"), primary_key=True),
        _version(),
        _column("status", sa.String(16)),
        *(_column(name, sa.Text) for name in ("problem", "source_uri", "resolved_uri")),
        _column("digest", sa.String(64)),
        _column("files", sa.JSON),
        _column("size", sa.BigInteger),
        _column("format", sa.String(32)),
        _column("arch", sa.String(64)),
        _column("params", sa.BigInteger),
        _column("dtype", sa.String(32)),
        _column("quantization", sa.String(32)),
        _column("context_length", sa.BigInteger),
        _column("license", sa.String(128)),
        _column("base_model", sa.String(512)),
        _column("base_relation", sa.String(32)),
        _column("card", sa.JSON),
        _column("tags", sa.JSON),
        _column("created_by", sa.String(128)),
        _column("created_at", sa.BigInteger),
    )
    op.create_index("model_version_digest", "model_version", ["digest"])
    op.create_table(
        "model_alias",
        _model(),
        sa.Column("alias", sa.String(64), primary_key=True),
        _column("version", sa.Integer),
        _column("moved_at", sa.BigInteger),
        _of_version(),
    )
    op.create_table(
        "alias_event",
        sa.Column("id", _COUNTER, primary_key=True),
        _column("model", sa.String(96)),
        _column("alias", sa.String(64)),
        sa.Column("previous", sa.Integer, nullable=True),
        sa.Column("version", sa.Integer, nullable=True),
        _column("actor", sa.String(128)),
        _column("at", sa.BigInteger),
    )
    op.create_index("alias_event_model", "alias_event", ["model", "alias"])
    op.create_table(
        "lineage",
        _model(),
        _version(),
        _column("system", sa.String(64)),
        _column("run_id", sa.String(256)),
        _column("run_url", sa.Text),
        _column("external_model_id", sa.String(512)),
        _column("git_commit", sa.String(64)),
        _column("params", sa.JSON),
        _column("metrics", sa.JSON),
        _of_version(),
    )
    op.create_table(
        "version_input",
        _model(),
        _version(),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        _column("kind", sa.String(16)),
        _column("name", sa.String(512)),
        _column("digest", sa.String(128)),
        _column("source_type", sa.String(64)),
        _column("source", sa.Text),
        _column("context", sa.String(64)),
        _of_version(),
    )
    op.create_table(
        "eval_result",
        sa.Column("id", _COUNTER, primary_key=True),
        _column("model", sa.String(96)),
        _column("version", sa.Integer),
        _column("task", sa.String(256)),
        _column("dataset", sa.String(512)),
        _column("revision", sa.String(128)),
        _column("split", sa.String(64)),
        _column("metric", sa.String(128)),
        _column("value", sa.Double),
        _column("source", sa.Text),
        _of_version(),
    )
    op.create_index("eval_result_version", "eval_result", ["model", "version"])


def downgrade() -> None:
    for table in ("eval_result", "version_input", "lineage", "alias_event", "model_alias", "model_version"):
        op.drop_table(table)
    op.drop_table("model")


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _model() -> sa.Column[str]:
    return sa.Column("model", sa.String(96), primary_key=True)


def _version() -> sa.Column[int]:
    return sa.Column("version", sa.Integer, primary_key=True, autoincrement=False)


def _of_version() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["model", "version"], ["model_version.model", "model_version.version"])
