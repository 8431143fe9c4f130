"""Questions to the ledger from an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.asking import Asker

if TYPE_CHECKING:
    from toque.monitor.ledger.database import Database


class LedgerReader(Asker["Database"]):
    """Opens the database with the first question, and keeps it open. Never migrates: the writer does."""

    def __init__(self, url: str) -> None:
        def opened() -> Database:
            from toque.monitor.ledger.database import Database

            return Database(url, migrate=False)

        super().__init__("ledger", opened)
