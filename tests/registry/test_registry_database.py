"""The registry's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import toque.registry
from toque.registry.database import SCHEMA, RegistryDatabase
from toque.registry.tables import metadata


def test_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    def known(thing: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
        return kind != "table" or name in metadata.tables  # the fleet's are the fleet's to compare

    database = RegistryDatabase(f"sqlite:///{tmp_path}/registry.db")
    with database.read() as connection:
        options = {"version_table": SCHEMA.version_table, "compare_type": True, "include_object": known}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == SCHEMA.head
    database.close()
    folder = Path(toque.registry.__file__).parent / "migrations"
    assert ScriptDirectory(str(folder)).get_current_head() == SCHEMA.head
