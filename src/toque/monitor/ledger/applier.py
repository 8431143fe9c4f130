"""The thread that brings the journal's records into the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import StoreError, ToqueError
from toque.monitor.ledger.journal import Journal
from toque.monitor.ledger.record import Outcome, UsageRecord, decode, encode
from toque.monitor.ledger.segment import Position
from toque.monitor.spend import REFRESH_S, Spend, month_of

if TYPE_CHECKING:
    from toque.monitor.ledger.database import Database

log = logging.getLogger("toque.ledger")

BATCH = 1_000
INTERVAL_S = 0.5
MAX_RETRY_S = 15.0
SWEEP_S = 600.0
HOUR_S, DAY_S = 3_600, 86_400
_MENDED_S = 7 * DAY_S  # what a start looks at of the sums that an older gateway may not have kept


@dataclass(frozen=True, slots=True)
class Retention:
    """How long rows stay: every request, and the sums by hour. Sums by day stay for good."""

    events_days: int = 90
    hours_days: int = 400


class Applier:
    """Reads the journal from its oldest segment on and applies it, again and again until the database takes it.

    A database that is slow or away makes the journal grow and this thread wait; nobody else notices. What the
    database refuses for good is put aside in ``rejected.log`` (one record a line, in hex) and counted.
    """

    def __init__(
        self,
        journal: Journal,
        open_database: Callable[[], Database],
        *,
        gateway: str,
        process: str,
        retention: Retention,
        interval_s: float = INTERVAL_S,
        spend: Spend | None = None,
        siblings: Callable[[], Iterable[tuple[Journal, str]]] = tuple,
        clock: Callable[[], float] = time.time,
        on_died: Callable[[UsageRecord], None] | None = None,
    ) -> None:
        """``siblings`` are journals that other, dead processes left behind, with the names of their gateways;
        ``on_died`` is told each row that is closed because its process died."""
        self._on_died = on_died
        self._siblings = siblings
        self._spend = spend
        self._next_spend = 0.0
        self._journal = journal
        self._open_database = open_database
        self._gateway = gateway
        self._process = process
        self._retention = retention
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._database: Database | None = None
        self._recovered = False
        self._next_sweep = 0.0
        self.position = Position(journal.leftover[0]) if journal.leftover else Position(journal.head.segment)
        self.applied = 0  # requests closed in the database
        self.rejected = 0
        self.failing_since = 0.0  # seconds since the epoch; 0: the database takes what it gets
        self.problem = ""
        self.busy_since = 0.0  # monotonic seconds; 0: it waits for work
        self._thread = threading.Thread(target=self._run, name="toque-ledger-db", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drained(self) -> bool:
        return self._recovered and self.position >= self._journal.head

    def wake(self) -> None:
        self._wake.set()

    def stop(self, wait_s: float) -> None:
        """Apply what is there, for at most ``wait_s``; what is left stays in the journal for the next process."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + wait_s
        while not self.drained() and not self.problem and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.005)
        self._stop.set()
        self._wake.set()
        self._thread.join(max(0.1, deadline - time.monotonic()))

    def _run(self) -> None:
        delay = self._interval_s
        while not self._stop.is_set():
            self._wake.wait(delay)
            self._wake.clear()
            try:
                self.busy_since = time.monotonic()
                self._work()
                delay = self._interval_s
                if self.problem:
                    away = self._clock() - self.failing_since
                    log.warning("the ledger's database is back; it was away for %.0f s", away)
                    self.problem, self.failing_since = "", 0.0
            except ToqueError as error:
                if not self.problem:
                    log.error("%s; usage waits on disk until it can be written", error)
                    self.failing_since = self._clock()
                self.problem = error.message
                delay = min(MAX_RETRY_S, 2 * max(delay, 0.25))
            except Exception as error:  # this thread must outlive whatever a driver comes up with
                log.exception("the ledger could not write")
                self.failing_since = self.failing_since or self._clock()
                self.problem = f"{type(error).__name__}: {error}"
                delay = min(MAX_RETRY_S, 2 * max(delay, 0.25))
            finally:
                self.busy_since = 0.0
        if self._database is not None:
            self._database.close()

    def _work(self) -> None:
        if self._database is None:
            self._database = self._open_database()
        while not self._stop.is_set():
            payloads, after = self._journal.read(self.position, BATCH)
            if payloads:
                self._apply([record for payload in payloads if (record := _decoded(payload)) is not None])
            if after != self.position:
                if after.segment != self.position.segment:
                    self._journal.forget(after.segment)
                self.position = after
                self.busy_since = time.monotonic()
            if len(payloads) < BATCH:
                break
        if not self._recovered:
            self._recover()
        if self._spend is not None and self._spend.wanted and time.monotonic() >= self._next_spend:
            month, _ = month_of(self._clock())
            self._spend.read(month, self._database.spent(month, self._process))
            self._next_spend = time.monotonic() + REFRESH_S
        if self._clock() >= self._next_sweep:
            self._sweep()

    def _apply(self, records: Sequence[UsageRecord]) -> None:
        from toque.sql import RejectedError

        assert self._database is not None
        try:
            self.applied += self._database.apply(records)
        except RejectedError as error:
            if len(records) == 1:
                self._put_aside(records[0], error)
                return
            half = len(records) // 2
            self._apply(records[:half])
            self._apply(records[half:])

    def _put_aside(self, record: UsageRecord, error: StoreError) -> None:
        log.error("request %s is put aside: %s", record.request_id, error)
        with open(self._journal.folder / "rejected.log", "a", encoding="ascii") as file:
            file.write(encode(record).hex() + "\n")
        self.rejected += 1

    def _recover(self) -> None:
        """Once, after the first replay: what an earlier process left open was cut off by its death."""
        for journal, gateway in self._siblings():
            position = Position(journal.leftover[0]) if journal.leftover else journal.head
            while position < journal.head:
                payloads, position = journal.read(position, BATCH)
                self._apply([record for payload in payloads if (record := _decoded(payload)) is not None])
            journal.forget(journal.head.segment)
            self._close_orphans(gateway)
        self._close_orphans(self._gateway)
        assert self._database is not None
        if self._database.mend_key_hours(int(self._clock()) // HOUR_S * HOUR_S - _MENDED_S):
            log.warning("sums by hour and key were not kept by an older gateway, and are added up again")
        self._recovered = True

    def _close_orphans(self, gateway: str) -> None:
        assert self._database is not None
        while orphans := self._database.orphans(gateway, self._process):
            now = int(self._clock() * 1e6)
            for record in orphans:
                record.outcome = Outcome.LOST.value
                record.closed_at = now
                record.finish_reason = "error"
                record.error_code = "gateway_died"
            self._database.apply(orphans)
            if self._on_died is not None:
                for record in orphans:
                    self._on_died(record)
            log.warning("%d requests were cut off when an earlier process died", len(orphans))

    def _sweep(self) -> None:
        assert self._database is not None
        now = int(self._clock())
        removed = self._database.expire(
            events_before=now - self._retention.events_days * DAY_S,
            hours_before=now - self._retention.hours_days * DAY_S,
        )
        self._next_sweep = now + (SWEEP_S if removed < 1_000 else self._interval_s)


def open_later(url: str) -> Callable[[], Database]:
    """Opens the database when it is first needed: SQLAlchemy takes 0.4 s to import, which no cold start waits for."""

    def opened() -> Database:
        from toque.monitor.ledger.database import Database

        return Database(url)

    return opened


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def _decoded(payload: bytes) -> UsageRecord | None:
    try:
        return decode(payload)
    except ValueError as error:
        log.error("a record of the ledger's journal is left out: %s", error)
        return None
