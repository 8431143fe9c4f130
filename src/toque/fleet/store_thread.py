"""One thread that runs blocking calls in order, for asyncio, and that no exit of the process waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class StoreThread:
    """A ThreadPoolExecutor's threads are waited for when the interpreter ends; one that hangs in a database's socket
    would keep a server from ending. This one is left behind."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Its result, or its exception. Cancelled before its turn, it is not called."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """After what was called before."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, function  # nothing of it is held while waiting for the next
