"""Runs the ledger's migrations on the connection that it is given; there is no alembic.ini and no command line."""

from __future__ import annotations

from alembic import context

from toque.monitor.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=context.config.attributes["version_table"],
    transaction_per_migration=False,
)
context.run_migrations()
