"""Questions to a database from an event loop: answered in a thread, one at a time, a few waiting at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from toque.errors import QueueFullError, StoreError, UnavailableError

MAX_WAITING = 8


class Closing(Protocol):
    def close(self) -> None: ...


D = TypeVar("D", bound=Closing)
T = TypeVar("T")


class Asker(Generic[D]):
    """Opens what is asked with the first question, in its thread, and keeps it open."""

    def __init__(self, name: str, open: Callable[[], D]) -> None:
        self._name = name
        self._open = open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"toque-{name}-read")
        self._waiting = 0
        self._opened: D | None = None

    async def ask(self, question: Callable[[D], T]) -> T:
        """UnavailableError when it is away, QueueFullError when too many ask; other errors are the question's."""
        if self._waiting >= MAX_WAITING:
            raise QueueFullError(
                f"{self._waiting} questions to the {self._name} wait already; try again later"
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question)
        except StoreError as error:
            raise UnavailableError(error.message, retry_after_s=5.0) from error
        finally:
            self._waiting -= 1

    def _answer(self, question: Callable[[D], T]) -> T:
        if self._opened is None:
            self._opened = self._open()
        return question(self._opened)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._opened is not None:
            self._opened.close()
