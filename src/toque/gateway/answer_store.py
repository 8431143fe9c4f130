"""Answers kept for requests that may come again: what an ``Idempotency-Key`` stands for.

This is the one place where Toque keeps text, and only of requests that carry such a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from toque.errors import StoreError

if TYPE_CHECKING:
    import sqlite3

log = logging.getLogger("toque.gateway")

T = TypeVar("T")
SWEEP_S = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answer (
    caller TEXT NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL, kept_at REAL NOT NULL,
    content_type TEXT NOT NULL, model TEXT NOT NULL, version TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (caller, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answer_kept_at ON answer (kept_at);
"""


class KeptAnswer(Struct, frozen=True):
    """A whole answer of status 200. ``digest`` is that of the request's path and body."""

    digest: bytes
    content_type: str
    model: str
    version: str
    body: bytes


class AnswerStore:
    """Answers by caller and key, for at most ``age_s``, all together at most ``max_bytes``: the oldest go first.

    A SQLite file that is opened with the first question and outlives this process. Work is done in a thread of its
    own. Guarantee: an answer whose `keep` has returned is found again, also after this process was killed. StoreError
    when the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        age_s: float = 86_400.0,
        max_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._age_s = age_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toque-answers")
        self._sweeper: threading.Thread | None = None
        self._stop = threading.Event()
        self._database: sqlite3.Connection | None = None
        self._bytes = 0
        self._next_sweep = 0.0

    def start(self, every_s: float = 600.0) -> None:
        """From now on forget what is too old also while nobody asks, and what an earlier process left."""

        def sweep() -> None:
            while True:
                if self._path.exists():
                    try:
                        self._thread.submit(self._do, self._sweep_now).result()
                    except StoreError as error:
                        log.error("%s", error)
                if self._stop.wait(every_s):
                    return

        self._sweeper = threading.Thread(target=sweep, name="toque-answers-sweep", daemon=True)
        self._sweeper.start()

    async def find(self, caller: str, name: str) -> KeptAnswer | None:
        return await self._run(lambda database: self._find(database, caller, name))

    async def keep(self, caller: str, name: str, answer: KeptAnswer) -> None:
        await self._run(lambda database: self._keep(database, caller, name, answer))

    def close(self) -> None:
        """Waits for what is being written."""
        self._stop.set()
        if self._sweeper is not None:
            self._sweeper.join()
        self._thread.shutdown(wait=True)
        if self._database is not None:
            self._database.close()
            self._database = None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, work)

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """In the one thread that has the database."""
        import sqlite3  # here, because nobody's cold start should wait for it

        try:
            if self._database is None:
                self._database = self._open()
            return work(self._database)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the kept answers in {self._path} cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self._path, timeout=15.0, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as undo:
            undo.callback(database.close)
            # What is removed is overwritten, and given back to the disk: these are people's texts.
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
            database.execute("PRAGMA secure_delete = ON")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
            undo.pop_all()
        return database

    def _find(self, database: sqlite3.Connection, caller: str, name: str) -> KeptAnswer | None:
        self._sweep(database)
        row = database.execute(
            "SELECT digest, content_type, model, version, body FROM answer"
            " WHERE caller = ? AND name = ? AND kept_at > ?",
            (caller, name, self._clock() - self._age_s),
        ).fetchone()
        return None if row is None else KeptAnswer(*row)

    def _keep(self, database: sqlite3.Connection, caller: str, name: str, answer: KeptAnswer) -> None:
        self._sweep(database)
        database.execute(
            "INSERT OR REPLACE INTO answer VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                caller,
                name,
                answer.digest,
                self._clock(),
                answer.content_type,
                answer.model,
                answer.version,
                answer.body,
            ),
        )
        self._bytes += len(answer.body)
        if self._bytes > self._max_bytes:
            self._sweep_now(database)

    def _sweep_now(self, database: sqlite3.Connection) -> None:
        self._next_sweep = 0.0
        self._sweep(database)

    def _sweep(self, database: sqlite3.Connection) -> None:
        """Remove what is too old, and the oldest while it is too much. Other gateways of this home write here, too."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        removed = database.execute("DELETE FROM answer WHERE kept_at <= ?", (now - self._age_s,)).rowcount
        self._bytes = database.execute("SELECT coalesce(sum(length(body)), 0) FROM answer").fetchone()[0]
        while self._bytes > self._max_bytes:
            caller, name, size = database.execute(
                "SELECT caller, name, length(body) FROM answer ORDER BY kept_at LIMIT 1"
            ).fetchone()
            database.execute("DELETE FROM answer WHERE caller = ? AND name = ?", (caller, name))
            self._bytes -= size
            removed += 1
        if removed:
            database.execute("PRAGMA incremental_vacuum").fetchall()
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
