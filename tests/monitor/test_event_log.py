"""The ring of trails on disk: found again by any of their ids, bounded, and left by a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from toque.monitor.event_log import EventLog, find_trails
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.trail import Trail, TrailKind


def trail(number: int, **fields: str) -> Trail:
    made = Trail(f"cmpl-{number:04d}", number, **fields)
    made.note(3, TrailKind.ADMITTED)
    made.note(9, TrailKind.CLOSED, note="ok 200")
    return made


def test_a_trail_is_found_by_its_id_its_clients_id_and_its_trace(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    first, second = trail(1, client_id="mine", trace_id="abc"), trail(2, client_id="mine")
    for made in (first, second):
        log.open(made)
        log.close(made)
    assert log.find("cmpl-0001") == [first]
    assert log.find("mine") == [first, second]
    assert log.find("abc") == [first]
    assert log.find("cmpl-000") == log.find("") == []
    log.stop()
    assert find_trails(tmp_path, "mine") == [first, second]


def test_an_open_request_is_told_as_far_as_it_has_come(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    running = Trail("cmpl-9", 1)
    running.note(0, TrailKind.ADMITTED)
    log.open(running)
    assert log.find("cmpl-9") == [running]
    assert find_trails(tmp_path, "cmpl-9") == []
    log.stop()


def test_the_oldest_make_room(tmp_path: Path) -> None:
    log = EventLog(tmp_path, max_bytes=2**18, segment_bytes=2**15)
    for number in range(6_000):
        log.close(trail(number))
        if number % 50 == 0:
            log.tidy()
    assert log.lost == 0
    size = sum(file.stat().st_size for file in (tmp_path / "events-0").glob("*.journal"))
    assert size <= 2**18
    assert log.find("cmpl-5999")
    assert not log.find("cmpl-0000")
    log.stop()


def test_a_full_ring_loses_trails_and_says_so_rather_than_wait(tmp_path: Path) -> None:
    log = EventLog(tmp_path, max_bytes=2**16, segment_bytes=2**15)
    for number in range(3_000):
        log.close(trail(number))
    assert log.lost > 0
    log.stop()


def test_what_was_kept_survives_the_death_of_the_process(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from toque.monitor.event_log import EventLog; from toque.monitor.trail import Trail;"
        "log = EventLog(Path(sys.argv[1])); log.close(Trail('cmpl-dead', 1)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), source], check=False, env=dict(os.environ)
    )
    assert done.returncode == -signal.SIGKILL
    again = EventLog(tmp_path)  # takes the dead one's place
    again.close(trail(7))
    assert [made.request_id for made in again.find("cmpl-dead")] == ["cmpl-dead"]
    assert again.find("cmpl-0007")
    again.stop()
    assert not (tmp_path / "events-1").exists()


def test_an_open_trail_is_noted_as_it_grows_and_told_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    short, long = trail(1), Trail("cmpl-long", 5, client_id="mine")
    long.note(0, TrailKind.ADMITTED)
    log.open(short)
    log.open(long)
    log.note_open()
    log.close(short)  # within a second: its end is all that is written
    assert find_trails(tmp_path, "mine") == []
    log.note_open()
    assert [len(found.moments) for found in find_trails(tmp_path, "mine")] == [1]
    size = log._journal.head
    log.note_open()  # nothing is new
    assert log._journal.head == size
    long.note(7, TrailKind.ROUTED, note="m-0.1")
    log.note_open()
    assert [len(found.moments) for found in find_trails(tmp_path, "mine")] == [2]
    long.note(8, TrailKind.FIRST_TOKEN)
    assert log.find("mine") == [long]
    long.note(9, TrailKind.CLOSED, note="ok 200")
    log.close(long)
    assert find_trails(tmp_path, "mine") == [long]
    assert find_trails(tmp_path, "cmpl-0001") == [short]
    log.stop()


def test_a_request_that_dies_with_its_gateway_keeps_its_events_and_gets_an_end(tmp_path: Path) -> None:
    code = """
import os, sys; from pathlib import Path
sys.path.insert(0, sys.argv[2])
from toque.monitor.event_log import EventLog
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.trail import Trail, TrailKind
log, ledger = EventLog(Path(sys.argv[1])), Ledger(Path(sys.argv[1]))
for name in ("cmpl-long", "cmpl-new"):
    entry = ledger.open(name, endpoint="/v1/completions", model="m", client_id="mine")
    trail = Trail(name, entry.record.opened_at, "mine", "", "/v1/completions", "m")
    trail.note(0, TrailKind.ADMITTED)
    log.open(trail)
    if name == "cmpl-long":
        log.note_open(); log.note_open()
os.kill(os.getpid(), 9)
"""
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), source], check=False)
    assert done.returncode == -signal.SIGKILL
    log = EventLog(tmp_path)
    for _ in range(2):  # the second start finds nothing that is open
        ledger = Ledger(tmp_path, on_died=log.died)
        ledger.start()
        assert ledger.flush()
        ledger.close()
        long, new = sorted(log.find("mine"), key=lambda found: found.request_id)
        assert [moment.kind for moment in long.ordered()] == ["admitted", "closed"]
        assert [moment.kind for moment in new.ordered()] == ["closed"]
        assert "gateway_died" in long.moments[-1].note
    log.stop()


def test_a_damaged_record_hides_no_other(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.close(trail(1))
    log.close(trail(2))
    log.stop()
    (file,) = (tmp_path / "events-0").glob("*.journal")
    data = bytearray(file.read_bytes())
    data[data.index(b"cmpl-0002")] ^= 1
    file.write_bytes(bytes(data))
    assert find_trails(tmp_path, "cmpl-0001")
    assert find_trails(tmp_path, "cmpl-0002") == []
