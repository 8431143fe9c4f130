"""The registry's database: which versions there are, what their aliases are, where they come from."""

from __future__ import annotations

from pathlib import Path

from toque.sql import Schema, SqlDatabase

SCHEMA = Schema("registry", "registry_version", Path(__file__).parent / "migrations")


class RegistryDatabase(SqlDatabase):
    """Everything raises StoreError, naming the database, when it cannot be reached."""

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date."""
        super().__init__(url, SCHEMA, migrate=migrate)
