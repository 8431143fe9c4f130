"""The ledger's face: what the gateway opens and closes a request with."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import StoreError
from toque.monitor.ledger.applier import Applier, Retention, open_later, sqlite_url
from toque.monitor.ledger.journal import MAX_BYTES, SEGMENT_BYTES, Journal, free_journal
from toque.monitor.ledger.reader import LedgerReader
from toque.monitor.ledger.record import Outcome, UsageRecord, encode
from toque.monitor.spend import Spend

if TYPE_CHECKING:
    from toque.monitor.ledger.database import Database

log = logging.getLogger("toque.ledger")

SYNC_S = 0.05
PROGRESS_S = 1.0
Priced = Callable[[UsageRecord], None]


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """``state`` is ``ok``; ``buffering`` while the database does not take rows; ``losing`` once the journal is full."""

    state: str
    reason: str
    open: int
    written: int
    pending_bytes: int
    lost: int
    rejected: int
    failing_since: float


@dataclass(slots=True)
class Totals:
    """What one model's requests came to since this process began."""

    requests: int = 0
    tokens: int = 0
    device_ns: int = 0
    list_nano: int = 0
    cost_nano: int = 0


class Entry:
    """One request's row while it is open. Set fields of ``record`` as they become known, then `close` it, once.

    The counts are noted down every second meanwhile, so that even a request that dies with its gateway keeps them.
    """

    __slots__ = ("_ledger", "_started", "closed", "record")

    def __init__(self, ledger: Ledger, record: UsageRecord, started: float) -> None:
        self._ledger = ledger
        self._started = started
        self.record = record
        self.closed = False

    def close(self, outcome: Outcome, status: int, *, finish_reason: str = "", error_code: str = "") -> None:
        """The request is over. The row is safe when this returns; later calls change nothing."""
        if self.closed:
            return
        self.closed = True
        record = self.record
        record.outcome = outcome.value
        record.status = status
        record.finish_reason = finish_reason
        record.error_code = error_code
        record.total_us = int((time.perf_counter() - self._started) * 1e6)
        # From the opening and a steady clock: a clock set back in between must not make a row end before it began.
        record.closed_at = record.opened_at + record.total_us
        self._ledger._close(record)


class Ledger:
    """Usage of one gateway process.

    `open` and `Entry.close` cost a few microseconds and never wait for a disk or a database. Once `close` has
    returned, the row survives the death of this process; after `sync_s` also a power cut. A database that is away is
    waited for, with the journal (bounded) holding what is to be written; `status` says so. When the journal is full,
    rows are lost, counted and reported: serving goes on.

    ``price`` fills in the amounts of a record that is about to close.
    """

    def __init__(
        self,
        folder: Path,
        *,
        url: str = "",
        price: Priced | None = None,
        spend: Spend | None = None,
        retention: Retention | None = None,
        sync_s: float = SYNC_S,
        apply_s: float = 0.5,
        stalled_s: float = 10.0,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
        open_database: Callable[[], Database] | None = None,
        on_died: Callable[[UsageRecord], None] | None = None,
    ) -> None:
        """``url`` defaults to SQLite in ``folder``. The threads begin with `start`; one of them calls ``on_died`` with
        the closed row of each request that an earlier process was killed with."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.url = url or sqlite_url(folder / "ledger.db")
        self._journal = free_journal(folder, "journal", segment_bytes=segment_bytes, max_bytes=max_bytes)
        gateway = _identity(self._journal.folder)
        self.process = f"{gateway}.{time.time_ns():x}"
        self._price = price
        self.spend = spend or Spend(clock=clock)
        self._clock = clock
        self._sync_s = sync_s
        self._stalled_s = stalled_s
        self._open: dict[str, Entry] = {}
        self.totals: dict[str, Totals] = {}
        self._lost = 0
        self._full = False
        self._written = 0
        self._dirty = threading.Event()
        self._stop = threading.Event()
        self.reader = LedgerReader(self.url)
        self._applier = Applier(
            self._journal,
            open_database or open_later(self.url),
            gateway=gateway,
            process=self.process,
            retention=retention or Retention(),
            interval_s=apply_s,
            clock=clock,
            spend=self.spend,
            siblings=lambda: _deserted(folder, self._journal.folder),
            on_died=on_died,
        )
        self._syncer = threading.Thread(target=self._sync_loop, name="toque-ledger-sync", daemon=True)

    def start(self) -> None:
        """Begin to sync, to replay what an earlier process left, and to write."""
        self._syncer.start()
        self._applier.start()

    def open(
        self,
        request_id: str,
        *,
        endpoint: str,
        model: str,
        version: str = "",
        tenant: str = "",
        key_id: str = "",
        client_id: str = "",
        idempotency_key: str = "",
        stream: bool = False,
        choices: int = 1,
        arrived: float = 0.0,
    ) -> Entry:
        """Open the row of an admitted request. ``request_id`` is new for every request. It began at ``arrived``
        (``time.perf_counter``; 0: now), which is what its times count from."""
        now = time.perf_counter()
        arrived = arrived or now
        record = UsageRecord(
            request_id,
            int((self._clock() - (now - arrived)) * 1e6),
            client_id=client_id,
            idempotency_key=idempotency_key,
            gateway=self.process,
            tenant=tenant,
            key_id=key_id,
            endpoint=endpoint,
            model=model,
            version=version,
            stream=stream,
            choices=choices,
        )
        entry = self._open[request_id] = Entry(self, record, arrived)
        if self._roomy():
            self._append(record)
        return entry

    def status(self) -> LedgerStatus:
        applier = self._applier
        if self._full:
            state = "losing"
            reason = (
                f"the journal is full, {self._lost} rows are lost; the database: {applier.problem or 'slow'}"
            )
        elif applier.problem:
            state, reason = "buffering", applier.problem
        elif (waiting := self._stalled()) > self._stalled_s:
            state, reason = "buffering", f"the database has not answered for {waiting:.1f} s"
        elif self._journal.size > self._journal.max_bytes // 2:
            state, reason = "buffering", "the database is slower than requests come"
        else:
            state, reason = "ok", ""
        return LedgerStatus(
            state=state,
            reason=reason,
            open=len(self._open),
            written=self._written,
            pending_bytes=self._journal.size,
            lost=self._lost,
            rejected=applier.rejected,
            failing_since=applier.failing_since,
        )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything so far is in the database; False when that took too long. Not for the event loop."""
        deadline = time.monotonic() + timeout_s
        while not self._applier.drained():
            if time.monotonic() > deadline:
                return False
            self._applier.wake()
            time.sleep(0.005)
        return True

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is left, for at most ``wait_s``, and let go of the journal. Open entries count as lost."""
        for entry in list(self._open.values()):
            entry.close(Outcome.LOST, 0, error_code="gateway_stopped")
        self._applier.stop(wait_s)
        self.reader.close()
        self._stop.set()
        self._dirty.set()
        if self._syncer.is_alive():
            self._syncer.join(wait_s)
        drained = self._applier.drained()
        head = self._journal.head
        self._journal.close()
        if drained:
            self._journal.forget(head.segment + 1)

    def _close(self, record: UsageRecord) -> None:
        self._open.pop(record.request_id, None)
        if self._price is not None:
            self._price(record)
        self.spend.add(record)
        total = self.totals.get(record.model)
        if total is None:
            total = self.totals[record.model] = Totals()
        total.requests += 1
        total.tokens += record.prompt_tokens + record.completion_tokens
        total.device_ns += record.device_ns
        total.list_nano += record.list_nano
        total.cost_nano += record.cost_nano
        self._append(record)
        self._written += 1

    def _append(self, record: UsageRecord) -> None:
        self._full = not self._journal.append(encode(record))
        self._lost += self._full and record.closed
        if not self._dirty.is_set():
            self._dirty.set()

    def _sync_loop(self) -> None:
        next_note = time.monotonic() + PROGRESS_S
        while not self._stop.is_set():
            self._dirty.wait(PROGRESS_S if self._open else None)
            self._dirty.clear()
            if time.monotonic() >= next_note:
                next_note = time.monotonic() + PROGRESS_S
                self._note_progress()
            try:
                self._journal.sync()
            except OSError as error:  # appended records are the kernel's all the same
                log.error("the ledger's journal cannot be synced: %s", error)
            self._stop.wait(self._sync_s)

    def _note_progress(self) -> None:
        for entry in list(self._open.values()):
            # A copy, because the event loop may close the entry meanwhile: a half-closed row must not be the first one.
            record = copy(entry.record)
            record.outcome, record.closed_at = Outcome.OPEN.value, 0
            if record.prompt_tokens and self._roomy():
                self._journal.append(encode(record))

    def _stalled(self) -> float:
        """Seconds since the database has been given something that it has not answered."""
        since = self._applier.busy_since
        return time.monotonic() - since if since else 0.0

    def _roomy(self) -> bool:
        """What only notes a request's opening or progress leaves the journal's last part to those that close."""
        return self._journal.size <= 0.9 * self._journal.max_bytes


def _deserted(folder: Path, own: Path) -> Iterator[tuple[Journal, str]]:
    """Journals of other gateways of this home that no process has any more, each with its gateway's name."""
    for path in sorted(folder.glob("journal-*")):
        if path == own or not path.is_dir():
            continue
        try:
            journal = Journal(path, segment_bytes=2**16)
        except (StoreError, OSError):
            continue
        try:
            yield journal, _identity(path)
        finally:
            journal.close()


def _identity(folder: Path) -> str:
    """A name for this journal's gateway that outlives its processes."""
    path = folder / "id"
    try:
        known = path.read_text(encoding="ascii").strip()
        if known:
            return known
    except FileNotFoundError:
        pass
    identity = uuid.uuid4().hex[:12]
    temporary = folder / "id.new"
    temporary.write_text(identity, encoding="ascii")
    os.replace(temporary, path)
    return identity
