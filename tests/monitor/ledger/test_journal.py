"""The journal: what was appended is read back, whatever happens to the process or to the end of the file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import StoreError
from toque.monitor.ledger.journal import Journal
from toque.monitor.ledger.segment import (
    FRAME,
    HEADER,
    Position,
    frame,
    header,
    records,
    segment_path,
    segments,
)

SMALL = 4096
payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=60)


def everything(journal: Journal, limit: int = 7) -> list[bytes]:
    position = Position(segments(journal.folder)[0])
    found: list[bytes] = []
    while True:
        some, after = journal.read(position, limit)
        found += some
        if after == position or not some:
            return found
        position = after


@settings(max_examples=60, deadline=None)
@given(payloads, st.integers(1, 50))
def test_what_was_appended_is_read_back_in_order(written: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), segment_bytes=SMALL)
        assert all(journal.append(payload) for payload in written)
        assert everything(journal, limit) == written
        journal.close()
        again = Journal(Path(folder), segment_bytes=SMALL)
        assert everything(again, limit) == written
        assert again.append(b"later")
        assert everything(again, limit) == [*written, b"later"]
        again.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.data())
def test_a_file_cut_or_damaged_anywhere_yields_the_whole_records_before(
    written: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(frame(3, payload) for payload in written)
    cut = data.draw(st.integers(0, len(whole)))
    ends = []
    for payload in written:
        ends.append((ends[-1] if ends else 0) + FRAME.size + len(payload))
    expected = [payload for payload, end in zip(written, ends, strict=True) if end <= cut]
    for tail in (b"", b"\0" * 64, os.urandom(3)):
        found = [bytes(payload) for _, payload in records(whole[:cut] + tail, 3)]
        assert found[: len(expected)] == expected
        if tail != b"" and not tail.strip(b"\0"):
            assert len(found) in (
                len(expected),
                len(expected) + 1,
            )  # zeros may complete a record that ends in zeros
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        found = [bytes(payload) for _, payload in records(bytes(flipped), 3)]
        assert found == [payload for payload, end in zip(written, ends, strict=True) if end <= at]


def test_records_of_another_segment_are_never_taken_for_its_own() -> None:
    assert not list(records(frame(4, b"stale"), 5))


def test_a_segment_that_was_truncated_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=SMALL)
    for number in range(100):
        journal.append(b"%03d" % number * 20)
    journal.close()
    first, *_ = numbers = segments(tmp_path)
    assert len(numbers) > 1
    os.truncate(segment_path(tmp_path, first), HEADER + 3 * (FRAME.size + 60) + 5)
    again = Journal(tmp_path, segment_bytes=SMALL)
    found = everything(again)
    assert found[:3] == [b"%03d" % number * 20 for number in range(3)]
    per_segment = (SMALL - HEADER) // (FRAME.size + 60)
    assert found[3:] == [b"%03d" % number * 20 for number in range(per_segment, 100)]
    again.close()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=SMALL)
    with pytest.raises(StoreError, match="belongs to a process"):
        Journal(tmp_path, segment_bytes=SMALL)
    journal.close()
    Journal(tmp_path, segment_bytes=SMALL).close()
    assert segments(tmp_path) == []  # nothing was written, nothing is left


def test_a_full_journal_says_so_and_takes_more_once_it_has_been_emptied(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=SMALL, max_bytes=3 * SMALL)
    kept = 0
    while journal.append(b"x" * 100):
        kept += 1
        journal.sync()
    assert kept == 3 * ((SMALL - HEADER) // (FRAME.size + 100))
    assert sum(file.stat().st_size for file in tmp_path.glob("*.journal")) == 3 * SMALL
    assert len(everything(journal)) == kept
    journal.forget(journal.head.segment)
    assert journal.append(b"x" * 100)
    journal.close()


def test_a_record_that_is_too_large_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=SMALL)
    assert journal.append(b"before")
    assert not journal.append(b"x" * 70_000)
    assert not journal.append(b"x" * SMALL)
    assert journal.append(b"after")
    assert everything(journal) == [b"before", b"after"]
    journal.close()


def test_appends_syncs_and_reads_in_threads_of_their_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=SMALL)
    done = threading.Event()

    def sync() -> None:
        while not done.is_set():
            journal.sync()

    def append(name: int) -> None:
        for number in range(400):
            assert journal.append(b"%d-%d" % (name, number) + b"x" * 50)

    threads = [threading.Thread(target=append, args=(name,)) for name in range(2)]
    syncer = threading.Thread(target=sync)
    for thread in (syncer, *threads):
        thread.start()
    position, found = Position(1), []
    while any(thread.is_alive() for thread in threads) or position < journal.head:
        some, position = journal.read(position, 100)
        found += some
        journal.forget(position.segment)
    done.set()
    syncer.join()
    assert len(found) == len(set(found)) == 800
    for name in range(2):
        mine = [payload for payload in found if payload.startswith(b"%d-" % name)]
        assert mine == [b"%d-%d" % (name, number) + b"x" * 50 for number in range(400)]
    journal.close()


_WRITER = """
import sys
from pathlib import Path
from toque.monitor.ledger.journal import Journal
journal = Journal(Path(sys.argv[1]), segment_bytes=4096)
number = 0
while True:
    assert journal.append(b"%d" % number + b"." * (number % 200))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
    number += 1
"""


def test_a_record_survives_the_death_of_its_process_once_append_has_returned(tmp_path: Path) -> None:
    for run in range(3):
        folder = tmp_path / str(run)
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(50 + 137 * run):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split("\n")[:-1]
        process.wait()
        process.stdout.close()
        confirmed = int(said[-1]) if said else 49 + 137 * run
        journal = Journal(folder, segment_bytes=SMALL)
        found = everything(journal)
        journal.close()
        assert len(found) >= confirmed + 1
        assert found == [b"%d" % n + b"." * (n % 200) for n in range(len(found))]
        shutil.rmtree(folder)


def test_a_stranger_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "000000000007.journal").write_bytes(b"not a segment")
    (tmp_path / "notes.txt").write_text("mine")
    journal = Journal(tmp_path, segment_bytes=SMALL)
    assert journal.head.segment == 8
    assert everything(journal) == []
    assert journal.append(b"x")
    assert header(8) == segment_path(tmp_path, 8).read_bytes()[:HEADER]
    journal.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"
