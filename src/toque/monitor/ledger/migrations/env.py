"""Runs the ledger's migrations on the connection that it is given."""

from __future__ import annotations

from toque.sql import run_migrations

run_migrations()
