"""The lives of requests on disk: a ring of segment files beside the ledger, the oldest overwritten first.

Writing copies into a mapped file, as the ledger's journal does, and never waits for the disk. Reading scans for the id:
64 MB take a tenth of a second, and nobody pays for an index.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from toque.monitor.ledger.journal import free_journal
from toque.monitor.ledger.record import UsageRecord
from toque.monitor.ledger.segment import HEADER, records, segment_path, segments
from toque.monitor.trail import Moment, Trail, TrailKind, decode, encode

log = logging.getLogger("toque.events")

NAME = "events"
SEGMENT_BYTES = 4 * 2**20
NOTE_S = 1.0
_MOST_FOUND = 100


class EventLog:
    """Trails of one gateway process, and of those before it, in at most ``max_bytes``.

    `open`, and `close` of a trail, cost microseconds and may be called in the event loop. A trail that is open is
    noted every second as far as it has come: a gateway that is killed takes what happened since along, and its
    successor adds the end (`lost`). StoreError when the folder cannot be written.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int = 64 * 2**20, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._journal = free_journal(folder, NAME, segment_bytes=segment_bytes, max_bytes=max_bytes)
        self.open_trails: dict[str, Trail] = {}
        self._noted: dict[str, int] = {}  # how many moments of an open trail are on disk
        self.lost = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tidy_loop, name="toque-events", daemon=True)
        self._thread.start()

    def open(self, trail: Trail) -> None:
        self.open_trails[trail.request_id] = trail

    def close(self, trail: Trail) -> None:
        """The request is over: its trail is kept."""
        self.open_trails.pop(trail.request_id, None)
        if not self._journal.append(encode(trail)):
            self.lost += 1

    def note_open(self) -> None:
        """Keep what is new in the trails that are open. Those that a second sees begin and end cost nothing."""
        noted, self._noted = self._noted, {}
        for trail in list(self.open_trails.values()):
            before, now = noted.get(trail.request_id), len(trail.moments)
            if before is not None and now > before:
                self._journal.append(encode(trail))
            self._noted[trail.request_id] = 0 if before is None else now

    def died(self, row: UsageRecord) -> None:
        """An earlier process was killed with this request, whose row has just been closed for it."""
        trail = Trail(row.request_id, row.opened_at, row.client_id, row.tenant, row.endpoint, row.model)
        trail.note(
            row.closed_at - row.opened_at,
            TrailKind.CLOSED,
            tokens=row.completion_tokens,
            note=f"{row.outcome} ({row.error_code}), noticed at the gateway's next start",
        )
        self._journal.append(encode(trail))

    def find(self, wanted: str) -> list[Trail]:
        """Trails by the request's own id or its client's, open ones included, oldest first. Not for the event loop."""
        still_open = [trail for trail in list(self.open_trails.values()) if _is(trail, wanted)]
        known = {trail.request_id for trail in still_open}
        ended = [trail for trail in find_trails(self._folder, wanted) if trail.request_id not in known]
        return ended + still_open

    def tidy(self) -> None:
        """Make room for what comes, by forgetting the oldest."""
        journal = self._journal
        oldest = segments(journal.folder)
        while oldest and journal.size > journal.max_bytes - 2 * self._segment_bytes:
            journal.forget(oldest.pop(0) + 1)
        journal.sync()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._journal.close()

    def _tidy_loop(self) -> None:
        while not self._stop.wait(NOTE_S):
            try:
                self.note_open()
                self.tidy()
            except OSError as error:
                log.error("the event log cannot be kept in order: %s", error)


def find_trails(folder: Path, wanted: str) -> list[Trail]:
    """What the event logs in ``folder`` have of a request, by its own id or its client's, oldest first."""
    found: dict[tuple[str, int], Trail] = {}
    for trail in _scan(folder, wanted):
        name = (trail.request_id, trail.opened_at)
        found[name] = _joined(found[name], trail) if name in found else trail
    return sorted(found.values(), key=lambda trail: trail.opened_at)[:_MOST_FOUND]


def _joined(one: Trail, other: Trail) -> Trail:
    """Two notes of one trail: one has all that the other has, but for the end that a later process may have added."""

    def ends(trail: Trail) -> list[Moment]:
        return [moment for moment in trail.moments if moment.kind == TrailKind.CLOSED]

    less, more = sorted((one, other), key=lambda trail: len(trail.moments) - len(ends(trail)))
    if not ends(more):
        more.moments += ends(less)
    return more


def _scan(folder: Path, wanted: str) -> Iterator[Trail]:
    needle = wanted.encode("utf-8", "replace")
    for path in sorted(folder.glob(f"{NAME}-*")):
        for number in segments(path):
            try:
                data = segment_path(path, number).read_bytes()
            except OSError:
                continue  # forgotten meanwhile
            if needle not in data:
                continue
            for _, payload in records(data, number, HEADER):
                if needle in bytes(payload):
                    try:
                        trail = decode(payload)
                    except ValueError as error:
                        log.error("a record of the event log is left out: %s", error)
                        continue
                    if _is(trail, wanted):
                        yield trail


def _is(trail: Trail, wanted: str) -> bool:
    return wanted in (trail.request_id, trail.client_id) or (wanted == trail.trace_id != "")
