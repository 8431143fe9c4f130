"""What the ledger costs: `python benchmarks/ledger.py [--rows 1000000] [--postgres URL]`.

Prints the time of `open` and `close` on the calling thread, the rate at which closed requests become safe and reach
the database, and how long usage over a large ledger takes. Figures are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from toque.monitor.ledger.database import Database
from toque.monitor.ledger.ledger import Ledger
from toque.monitor.ledger.record import Outcome, UsageRecord


def hot_path(folder: Path, url: str, count: int, per_second: int) -> None:
    """``count`` requests, ``per_second`` of them a second, opened and closed while everything behind runs."""
    ledger = Ledger(folder, url=url)
    ledger.start()
    ledger.open("warm", endpoint="/v1/completions", model="m").close(Outcome.OK, 200)
    ledger.flush(30)
    opens, closes = [], []
    cpu, started = time.process_time(), time.perf_counter()
    for number in range(count):
        due = started + number / per_second
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        a = time.perf_counter()
        entry = ledger.open(
            f"chatcmpl-{number:032x}",
            endpoint="/v1/chat/completions",
            model="smollm2",
            version="sha256:0123456789abcdef",
            tenant="acme",
            client_id=f"req-{number:032x}",
        )
        b = time.perf_counter()
        entry.record.prompt_tokens, entry.record.completion_tokens = 120, 60
        c = time.perf_counter()
        entry.close(Outcome.OK, 200, finish_reason="stop")
        closes.append(time.perf_counter() - c)
        opens.append(b - a)
    safe = time.perf_counter() - started
    assert ledger.flush(60)
    written = time.perf_counter() - started
    used = time.process_time() - cpu
    status = ledger.status()
    ledger.close()
    rows = Database(ledger.url)
    with rows.read() as connection:
        stored = connection.exec_driver_sql("SELECT count(*) FROM usage_event WHERE outcome = 'ok'").scalar()
    rows.close()

    def spread(times: list[float]) -> str:
        at = sorted(times)
        return f"{statistics.median(at) * 1e6:.1f} us, p99 {at[len(at) * 99 // 100] * 1e6:.1f}, max {at[-1] * 1e6:.0f}"

    print(f"open   {spread(opens)}")
    print(f"close  {spread(closes)}")
    print(
        f"{count} requests closed in {safe:.2f} s ({count / safe:.0f}/s), in the database after {written:.2f} s; "
        f"{used / count * 1e6:.0f} us of CPU each, all threads; rows {stored}, lost {status.lost}"
    )
    assert stored == count + 1
    assert status.lost == 0


def fill(database: Database, rows: int) -> float:
    """A month of requests: 3 models, 20 tenants of 2 keys, 2 endpoints."""
    rng = random.Random(0)
    began = 1_788_220_800  # 2026-09-01
    started = time.perf_counter()
    for batch in range(0, rows, 5_000):
        records = []
        for number in range(batch, min(rows, batch + 5_000)):
            opened = (began + 30 * 86_400 * number // rows) * 1_000_000
            tenant = rng.randrange(20)
            prompt, completion = rng.randrange(1, 2_000), rng.randrange(500)
            records.append(
                UsageRecord(
                    f"r{number}",
                    opened,
                    closed_at=opened + 900_000,
                    outcome="ok",
                    status=200,
                    tenant=f"t{tenant}",
                    key_id=f"k{tenant}-{rng.randrange(2)}",
                    endpoint=rng.choice(("/v1/chat/completions", "/v1/completions")),
                    model=rng.choice(("smollm2", "gemma3", "qwen")),
                    version="v1",
                    prompt_tokens=prompt,
                    cached_tokens=prompt // 3,
                    completion_tokens=completion,
                    total_us=900_000,
                    list_nano=prompt * 50 + completion * 200,
                    cost_nano=prompt * 20 + completion * 90,
                )
            )
        database.apply(records)
    return time.perf_counter() - started


def queries(url: str, rows: int) -> None:
    from toque.monitor.ledger.usage import UsageQuery, usage

    database = Database(url)
    took = fill(database, rows)
    print(f"{rows} rows written in batches of 5,000 in {took:.1f} s ({rows / took:.0f}/s)")
    month = {"since": 1_788_220_800, "until": 1_788_220_800 + 30 * 86_400}
    for by in (
        ("model",),
        ("tenant", "model"),
        ("key", "endpoint"),
        ("day", "model"),
        ("hour",),
        ("hour", "tenant"),
        ("hour", "key"),
        ("hour", "model"),
    ):
        times = []
        for _ in range(5):
            started = time.process_time()
            found = usage(database, UsageQuery(by=by, **month))
            times.append(time.process_time() - started)
        taken = statistics.median(times) * 1e3
        print(f"usage by {', '.join(by):<14} {len(found.rows):>6} rows  {taken:7.1f} ms of CPU")
        assert sum(row["requests"] for row in found.rows) == rows
    database.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--postgres", default="", help="an empty PostgreSQL database instead of SQLite")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        place = Path(folder)
        hot_path(place / "hot", options.postgres, options.requests, options.rate)
        if options.rows:
            queries(f"sqlite:///{place}/large.db", options.rows)


if __name__ == "__main__":
    main()
