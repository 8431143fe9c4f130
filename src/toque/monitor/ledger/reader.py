"""Questions to the ledger from an event loop: answered in a thread, one at a time, a few waiting at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from toque.errors import QueueFullError, StoreError, UnavailableError

if TYPE_CHECKING:
    from toque.monitor.ledger.database import Database

T = TypeVar("T")
MAX_WAITING = 8


class LedgerReader:
    """Opens the database with the first question, and keeps it open. Never migrates: the writer does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toque-ledger-read")
        self._waiting = 0
        self._database: Database | None = None

    async def ask(self, question: Callable[[Database], T]) -> T:
        """UnavailableError when the database is away, QueueFullError when too many ask."""
        if self._waiting >= MAX_WAITING:
            raise QueueFullError(f"{self._waiting} questions to the ledger wait already; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question)
        except StoreError as error:
            raise UnavailableError(error.message, retry_after_s=5.0) from error
        finally:
            self._waiting -= 1

    def _answer(self, question: Callable[[Database], T]) -> T:
        if self._database is None:
            from toque.monitor.ledger.database import Database

            self._database = Database(self._url, migrate=False)
        return question(self._database)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._database is not None:
            self._database.close()
