"""The ledger's memory between an answer and the database: an append-only journal in mapped files.

Why mapped files: a record must be out of the process before the client has its answer, or a crash between the two
would lose it; and `append` runs on the event loop. Copying into a shared mapping is neither a system call nor a
release of the interpreter's lock (a `write` is both: with another thread busy it may come back 5 ms later), and what
has been copied belongs to the kernel: it survives the death of the process. A power cut may take what has not been
synced yet, at most ``sync_s``.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from pathlib import Path

from toque.errors import StoreError
from toque.monitor.ledger.segment import (
    HEADER,
    MAX_PAYLOAD,
    Position,
    frame,
    header,
    records,
    segment_path,
    segments,
)

SEGMENT_BYTES = 4 * 2**20
MAX_BYTES = 256 * 2**20
MAX_JOURNALS = 16
_CHUNK = 2**20  # larger than any record


class Journal:
    """Appends records to a folder that this process alone writes; StoreError when another one has it.

    Guarantees: a record whose `append` returned True is read back after the process has died, wherever it died;
    `append` never blocks on the disk beyond the kernel's own page handling; the folder never holds more than
    ``max_bytes`` (then `append` returns False and the record is not kept). Thread-safe.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise StoreError(f"the ledger's journal {folder} belongs to a process that runs") from None
        self._segment_bytes = segment_bytes
        self._max_segments = max(2, max_bytes // self._segment_bytes)
        self._lock = threading.Lock()
        self.leftover = segments(folder)  # written by processes before this one
        (folder / "spare").unlink(missing_ok=True)
        self._count = len(self.leftover)
        self._number = (self.leftover[-1] if self.leftover else 0) + 1
        self._spare: _Segment | None = None
        self._current: _Segment | None = _Segment(folder, self._number, self._segment_bytes)
        self._count += 1
        self._offset = HEADER
        self._synced = Position(self._number)
        self._unsynced: list[_Segment] = []

    @property
    def head(self) -> Position:
        """Where the next record will be; everything before it can be read."""
        with self._lock:
            return Position(self._number, self._offset)

    @property
    def size(self) -> int:
        return self._count * self._segment_bytes

    @property
    def max_bytes(self) -> int:
        return self._max_segments * self._segment_bytes

    def append(self, payload: bytes) -> bool:
        """Keep a record. False when the journal is full (or closed, or the record is larger than 64 KiB)."""
        with self._lock:
            segment = self._current
            if segment is None or len(payload) > MAX_PAYLOAD:
                return False
            record = frame(self._number, payload)
            end = self._offset + len(record)
            if end > self._segment_bytes:
                segment = self._rotate()
                if segment is None:
                    return False
                record = frame(self._number, payload)
                end = self._offset + len(record)
                if end > self._segment_bytes:
                    return False
            segment.map[self._offset : end] = record
            self._offset = end
            return True

    def sync(self) -> bool:
        """Bring everything appended so far to the disk, and a spare segment into place. False: there was nothing."""
        with self._lock:
            head = Position(self._number, self._offset)
            current = self._current
            older, self._unsynced = self._unsynced, []
        for segment in older:
            segment.sync()
            segment.close()
        if current is None or head == self._synced:
            return bool(older)
        current.sync()
        self._synced = head
        if head.offset > self._segment_bytes // 2 and self._spare is None and self._room():
            with contextlib.suppress(OSError):  # a full disk is met again by whoever needs the segment
                self._prepare(head.segment + 1)
        return True

    def _prepare(self, number: int) -> None:
        """Have the next segment ready, unless `append` was faster."""
        spare = _Segment(self.folder / "spare", number, self._segment_bytes)
        with self._lock:
            if self._current is not None and self._number == number - 1 and self._spare is None:
                spare.path.rename(segment_path(self.folder, number))
                spare.path = segment_path(self.folder, number)
                self._spare = spare
                self._count += 1
                return
        spare.remove()

    def read(self, position: Position, limit: int) -> tuple[list[bytes], Position]:
        """Up to ``limit`` payloads from ``position`` on, and where the next ones begin."""
        head = self.head
        found: list[bytes] = []
        while len(found) < limit:
            live = position.segment >= head.segment
            data = _content(self.folder, position, head.offset if live else self._segment_bytes)
            start = position
            for end, payload in records(data, position.segment):
                found.append(bytes(payload))
                position = Position(position.segment, start.offset + end)
                if len(found) >= limit:
                    return found, position
            if position == start:
                if live:
                    break
                position = Position(position.segment + 1)
        return found, position

    def forget(self, before: int) -> None:
        """Remove the segments numbered below ``before``: all that they hold is in the database."""
        with self._lock:
            before = before if self._current is None else min(before, self._number)
        for number in segments(self.folder):
            if number < before:
                segment_path(self.folder, number).unlink(missing_ok=True)
                with self._lock:
                    self._count -= 1

    def close(self) -> None:
        """Sync and let go of the folder. An idle last segment is removed."""
        self.sync()
        with self._lock:
            current, self._current = self._current, None
            spare, self._spare = self._spare, None
            empty = self._offset == HEADER
        if spare is not None:
            spare.remove()
        if current is not None:
            current.remove() if empty else current.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _room(self) -> bool:
        return self._count < self._max_segments

    def _rotate(self) -> _Segment | None:
        spare, self._spare = self._spare, None
        if spare is None:
            if not self._room():
                return None
            try:
                spare = _Segment(self.folder, self._number + 1, self._segment_bytes)
            except OSError:
                return None
            self._count += 1
        assert self._current is not None
        self._unsynced.append(self._current)
        self._current = spare
        self._number += 1
        self._offset = HEADER
        return spare


def free_journal(folder: Path, name: str, *, segment_bytes: int, max_bytes: int) -> Journal:
    """Several processes of one home each have a journal ``name-N``; the first that no living process has is taken
    over, with what is in it. StoreError when there are too many, or the folder cannot be written."""
    for number in range(MAX_JOURNALS):
        try:
            return Journal(folder / f"{name}-{number}", segment_bytes=segment_bytes, max_bytes=max_bytes)
        except StoreError:
            continue
        except OSError as error:
            raise StoreError(f"{folder / name}-{number} cannot be written: {error.strerror}") from None
    raise StoreError(f"{MAX_JOURNALS} processes keep a {name} in {folder} already")


class _Segment:
    """A file of fixed size, its blocks reserved, mapped for writing. ``place`` is a folder, or a file to be renamed."""

    def __init__(self, place: Path, number: int, size: int) -> None:
        self.path = segment_path(place, number) if place.is_dir() else place
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Reserved, not just long: a store into a mapping of a full disk would be a bus error.
            os.posix_fallocate(self._fd, 0, size)
            self.map = mmap.mmap(self._fd, size)
        except OSError:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise
        self.map[:HEADER] = header(number)

    def sync(self) -> None:
        os.fdatasync(self._fd)  # releases the interpreter's lock, which mmap.flush does not

    def close(self) -> None:
        self.map.close()
        os.close(self._fd)

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


def _content(folder: Path, position: Position, end: int) -> bytes:
    """Up to a megabyte of a segment from ``position`` on; b"" when the file is not there or not this segment."""
    try:
        with open(segment_path(folder, position.segment), "rb", buffering=0) as file:
            if file.read(HEADER) != header(position.segment):
                return b""
            return os.pread(file.fileno(), max(0, min(end - position.offset, _CHUNK)), position.offset)
    except FileNotFoundError:
        return b""
