"""The ledger as the gateway uses it: opened, closed, replayed; with a database that is slow, away or wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toque.errors import StoreError
from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome


def rows(folder: Path, *columns: str) -> list[tuple[Any, ...]]:
    database = Database(f"sqlite:///{folder}/ledger.db")
    with database.read() as connection:
        found = connection.exec_driver_sql(
            f"SELECT {', '.join(columns)} FROM usage_event ORDER BY request_id"
        ).all()
    database.close()
    return [tuple(row) for row in found]


def serve(ledger: Ledger, name: str, tokens: int = 5) -> None:
    entry = ledger.open(name, endpoint="/v1/completions", model="parrot", tenant="acme")
    entry.record.prompt_tokens, entry.record.completion_tokens = 3, tokens
    entry.close(Outcome.OK, 200, finish_reason="stop")


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def test_a_request_becomes_one_row(tmp_path: Path) -> None:
    ledger = Ledger(
        tmp_path, price=lambda record: setattr(record, "list_nano", record.completion_tokens * 10)
    )
    ledger.start()
    serve(ledger, "a", 5)
    entry = ledger.open("b", endpoint="/v1/chat/completions", model="parrot", stream=True, choices=2)
    assert ledger.status().open == 1
    assert ledger.flush()
    assert rows(tmp_path, "request_id", "outcome") == [("a", "ok"), ("b", "open")]
    entry.close(Outcome.CANCELLED, 499)
    entry.close(Outcome.OK, 200)  # too late
    ledger.close()
    found = rows(
        tmp_path, "request_id", "outcome", "status", "completion_tokens", "list_nano", "choices", "stream"
    )
    assert found == [("a", "ok", 200, 5, 50, 1, 0), ("b", "cancelled", 499, 0, 0, 2, 1)]
    for opened, closed, total in rows(tmp_path, "opened_at", "closed_at", "total_us"):
        assert closed == opened + total
        assert abs(opened / 1e6 - time.time()) < 60
    assert not list(tmp_path.glob("journal-0/*.journal"))  # all of it is in the database


def test_what_was_closed_before_a_crash_is_written_by_the_next_process(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome
ledger = Ledger(Path(sys.argv[1]), apply_s=0.05)
if sys.argv[2] == "started":
    ledger.start()
for number in range(int(sys.argv[3])):
    entry = ledger.open(f"r{number:04d}", endpoint="e", model="m")
    entry.record.prompt_tokens, entry.record.completion_tokens = 3, number
    if number % 10 != 9:
        entry.close(Outcome.OK, 200)
        print(number, flush=True)  # the client has its answer
os.kill(os.getpid(), 9)
"""
    for run, started in enumerate(("started", "not", "started")):
        folder = tmp_path / str(run)
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder), started, str(300 + 50 * run)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        answered = {f"r{int(line):04d}": int(line) for line in done.stdout.split()}
        assert len(answered) >= 270
        for _ in range(2):  # the second time there is nothing left to replay, and nothing doubles
            ledger = Ledger(folder)
            ledger.start()
            assert ledger.flush()
            ledger.close()
        found = rows(folder, "request_id", "outcome", "completion_tokens", "error_code")
        closed = {row[0]: row[2] for row in found if row[1] == "ok"}
        assert closed == answered
        lost = [row for row in found if row[1] != "ok"]
        assert len(lost) == len(found) // 10
        assert {(row[1], row[3]) for row in lost} == {("lost", "gateway_died")}


def _noted(folder: Path) -> bool:
    """Whether a request that is open has tokens in the database, if there is one already."""
    time.sleep(0.1)
    return (folder / "ledger.db").exists() and any(count for (count,) in rows(folder, "completion_tokens"))


def test_a_request_that_dies_with_its_gateway_keeps_what_was_noted(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from toque.monitor.ledger.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.start()
entry = ledger.open("long", endpoint="e", model="m")
entry.record.prompt_tokens = 11
while True:
    entry.record.completion_tokens += 1
    print(entry.record.completion_tokens, flush=True)
    time.sleep(0.01)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    soon(lambda: _noted(tmp_path))
    process.kill()
    generated = int(process.stdout.read().split()[-1])
    process.stdout.close()
    process.wait()
    ledger = Ledger(tmp_path)
    ledger.start()
    assert ledger.flush()
    ledger.close()
    ((outcome, prompt, completion),) = rows(tmp_path, "outcome", "prompt_tokens", "completion_tokens")
    assert (outcome, prompt) == ("lost", 11)
    assert 0 < completion <= generated + 1


class Flaky:
    """A database that is away while ``away`` is set, or hangs while ``hanging`` is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.away = threading.Event()
        self.hanging = threading.Event()

    def open(self) -> Database:
        if self.away.is_set():
            raise StoreError("the database is away")
        database = Database(self.url)
        apply = database.apply

        def flaky(records: Any) -> int:
            while self.hanging.is_set():
                time.sleep(0.01)
            if self.away.is_set():
                raise StoreError("the database is away")
            return apply(records)

        database.apply = flaky  # type: ignore[method-assign]
        return database


def test_a_database_that_is_away_costs_nothing_but_time(tmp_path: Path) -> None:
    flaky = Flaky(f"sqlite:///{tmp_path}/ledger.db")
    flaky.away.set()
    ledger = Ledger(tmp_path, apply_s=0.02, open_database=flaky.open)
    ledger.start()
    for number in range(50):
        serve(ledger, f"a{number}")
    soon(lambda: ledger.status().state == "buffering")
    assert "away" in ledger.status().reason
    assert ledger.status().failing_since > 0
    flaky.away.clear()
    soon(lambda: ledger.status().state == "ok")
    serve(ledger, "later")
    assert ledger.flush()
    flaky.hanging.set()
    for number in range(200):  # it hangs until all of them are served
        serve(ledger, f"b{number}")
    flaky.hanging.clear()
    assert ledger.flush()
    ledger.close()
    assert len(rows(tmp_path, "request_id")) == 251


def test_a_stop_while_the_database_is_away_leaves_the_rows_to_the_next_process(tmp_path: Path) -> None:
    flaky = Flaky(f"sqlite:///{tmp_path}/ledger.db")
    flaky.away.set()
    ledger = Ledger(tmp_path, apply_s=0.02, open_database=flaky.open)
    ledger.start()
    serve(ledger, "a")
    ledger.open("open", endpoint="e", model="m")
    soon(lambda: ledger.status().state == "buffering")
    started = time.monotonic()
    ledger.close(wait_s=2.0)
    assert time.monotonic() - started < 30
    ledger = Ledger(tmp_path)
    ledger.start()
    assert ledger.flush()
    ledger.close()
    assert rows(tmp_path, "request_id", "outcome", "error_code") == [
        ("a", "ok", ""),
        ("open", "lost", "gateway_stopped"),
    ]


def test_a_full_journal_loses_rows_and_says_how_many(tmp_path: Path) -> None:
    flaky = Flaky(f"sqlite:///{tmp_path}/ledger.db")
    flaky.away.set()
    ledger = Ledger(tmp_path, apply_s=0.02, segment_bytes=8192, max_bytes=16 * 8192, open_database=flaky.open)
    ledger.start()
    count = 0
    while not ledger.status().lost:
        serve(ledger, f"r{count}")
        count += 1
    status = ledger.status()
    assert (status.state, status.lost) == ("losing", 1)
    assert status.pending_bytes == 16 * 8192
    flaky.away.clear()
    assert ledger.flush()
    serve(ledger, "after")
    soon(lambda: ledger.status().state == "ok")
    ledger.close()
    assert len([row for row in rows(tmp_path, "outcome") if row == ("ok",)]) == count


def test_a_record_that_the_database_will_not_take_is_put_aside(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, apply_s=0.02)
    for number in range(20):
        serve(ledger, f"r{number}", tokens=2**63 if number == 7 else 1)
    ledger.start()
    assert ledger.flush()
    assert ledger.status().rejected == 1
    assert (tmp_path / "journal-0" / "rejected.log").read_text().count("\n") == 1
    ledger.close()
    found = dict(rows(tmp_path, "request_id", "outcome"))
    assert found == {f"r{number}": "open" if number == 7 else "ok" for number in range(20)}


def test_two_processes_of_one_home_have_a_journal_each_and_share_the_tables(tmp_path: Path) -> None:
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    for ledger in (first, second):
        ledger.start()
    serve(first, "a")
    serve(second, "b")
    still = second.open("c", endpoint="e", model="m")
    assert first.flush()
    assert second.flush()
    assert first.process != second.process
    assert rows(tmp_path, "request_id", "outcome") == [("a", "ok"), ("b", "ok"), ("c", "open")]
    first.close()
    third = Ledger(tmp_path)  # takes the first one's journal, and leaves the other gateway's request alone
    third.start()
    assert third.flush()
    assert rows(tmp_path, "request_id", "outcome")[2] == ("c", "open")
    third.close()
    still.close(Outcome.OK, 200)
    second.close()
    assert rows(tmp_path, "request_id", "outcome")[2] == ("c", "ok")


def test_a_journal_that_nobody_has_any_more_is_replayed_by_whoever_starts(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome
first, second = Ledger(Path(sys.argv[1])), Ledger(Path(sys.argv[1]))
second.open("closed", endpoint="e", model="m").close(Outcome.OK, 200)
second.open("open", endpoint="e", model="m")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    ledger = Ledger(tmp_path)
    ledger.start()
    assert ledger.flush()
    ledger.close()
    assert rows(tmp_path, "request_id", "outcome") == [("closed", "ok"), ("open", "lost")]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal-0").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        Ledger(tmp_path)


def test_opening_a_ledger_imports_neither_sqlalchemy_nor_alembic() -> None:
    code = (
        "import sys, toque.monitor.ledger.ledger;"
        "sys.exit(any(m in sys.modules for m in ('sqlalchemy', 'alembic', 'sqlite3')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    serve(ledger, "a")
    modes = {
        path.name: os.stat(path).st_mode & 0o077 for path in (tmp_path / "ledger" / "journal-0").iterdir()
    }
    ledger.close()
    assert not any(mode for name, mode in modes.items() if name.endswith(".journal")), json.dumps(modes)
