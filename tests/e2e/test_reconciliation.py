"""The books of a real server with two replicas, both of which are killed under it, and then itself (BR-073, BR-079).

Ledger = usage in answers = counters on /metrics = what the engines counted, to the token; no row is lost or doubled.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server import Server, run, serving

CONFIG = """
fleet: {replicas: 2}
ledger:
  prices:
    parrot: {input: 0.5, output: 2.0, cached_input: 0.1}
"""
TOKENS = ("prompt_tokens", "completion_tokens")


@dataclass
class Told:
    """What clients were told, by the id of the answer."""

    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # tokens that a client had when it left
    refused: int = 0
    replayed: int = 0
    failed: list[str] = field(default_factory=list)

    def whole(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            body = answer.json()
            self.usage[body["id"]] = body["usage"]
        elif answer.status_code == 400:
            self.refused += 1
        else:
            self.failed.append(answer.text)


@dataclass
class Steady:
    """A stream that goes on until it is ``over``, whoever dies; ``tokens`` that its reader has, of all its requests."""

    over: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0


def _stream(
    server: Server, told: Told, body: dict[str, Any], leave_after: int = 0, steady: Steady | None = None
) -> None:
    body = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    tokens, name = 0, ""
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        if answer.status_code != 200:
            told.failed.append(answer.read().decode())
            return
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                told.failed.append(line)
                return
            name = event["id"]
            if event.get("usage"):
                told.usage[name] = event["usage"]
            tokens += len(event["choices"])
            if steady is not None:
                steady.tokens += len(event["choices"])
            if (leave_after and tokens >= leave_after) or (steady is not None and steady.over.is_set()):
                told.left[name] = tokens
                return


def _goes_on(server: Server, steady: Steady, told: Told) -> None:
    """Waits for its next token, so that no two deaths come without one in between: that would end it."""
    seen = steady.tokens
    server.until(lambda: steady.tokens > seen or bool(told.failed), 60)


def _something(server: Server, told: Told, rng: random.Random) -> None:
    """One request of some kind."""
    prompt = "abcdefgh" * rng.randrange(1, 12) + rng.choice(["\n", "!"])
    ask: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 60), "temperature": 0}
    match rng.randrange(7):
        case 0:
            messages = [{"role": "user", "content": "hi" * rng.randrange(1, 9)}]
            told.whole(server.post("/v1/chat/completions", messages=messages, n=rng.randrange(1, 3)))
        case 1:
            told.whole(server.post("/v1/completions", **ask, n=rng.randrange(1, 4)))
        case 2:
            told.whole(server.post("/v1/completions", **(ask | {"prompt": [prompt, "other\n"]})))
        case 3:
            _stream(server, told, ask)
        case 4:
            _stream(
                server, told, ask | {"prompt": "go!", "max_tokens": 400}, leave_after=rng.randrange(1, 30)
            )
        case 5:
            told.whole(server.post("/v1/completions", **(ask | {"temperature": 9})))
        case _:
            headers = {"idempotency-key": f"{rng.random()}"}
            answers = [
                httpx.post(
                    server.url + "/v1/completions",
                    json={"model": server.model, **ask},
                    headers=headers,
                    timeout=60,
                )
                for _ in range(2)
            ]
            assert answers[0].content == answers[1].content
            told.replayed += "idempotent-replayed" in answers[1].headers
            told.whole(answers[0])


def _at_once(
    work: Callable[[random.Random], None], *, threads: int, rounds: int, seed: int
) -> list[threading.Thread]:
    def several(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(rounds):
            work(rng)

    started = [threading.Thread(target=several, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    return started


def _ledger(server: Server) -> Path:
    return server.home / "ledger" / "ledger.db"


def _read(path: Path, query: str) -> list[dict[str, Any]]:
    database = sqlite3.connect(path, timeout=60)
    database.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in database.execute(query)]
    finally:
        database.close()


def _rows(server: Server) -> dict[str, dict[str, Any]]:
    """The ledger's rows once nothing is open, with their attempts."""
    server.until(lambda: server.metric("toque_ledger_open_requests") == 0)
    written = server.metric("toque_ledger_rows_total")
    path = _ledger(server)
    made = "SELECT count(*) n FROM sqlite_master WHERE name = 'usage_attempt'"
    server.until(lambda: path.exists() and _read(path, made)[0]["n"] == 1)
    server.until(
        lambda: _read(path, "SELECT count(*) n FROM usage_event WHERE outcome != 'open'")[0]["n"] >= written
    )
    rows = {row["request_id"]: {**row, "attempts": []} for row in _read(path, "SELECT * FROM usage_event")}
    for attempt in _read(path, "SELECT * FROM usage_attempt ORDER BY request_id, number"):
        rows[attempt["request_id"]]["attempts"].append(attempt)
    return rows


def _check(rows: dict[str, dict[str, Any]], told: Told, server: Server) -> None:
    """Every answer has the row that says what it said, and all rows together are what /metrics says."""
    assert not told.failed
    for name, usage in told.usage.items():
        row = rows[name]
        assert row["outcome"] == "ok"
        assert {n: row[n] for n in TOKENS} == {n: usage[n] for n in TOKENS}, name
        assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        paid = (row["prompt_tokens"] - row["cached_tokens"]) * 500 + row["cached_tokens"] * 100
        assert row["list_nano"] == paid + row["completion_tokens"] * 2_000
    for name, tokens in told.left.items():
        assert rows[name]["completion_tokens"] >= tokens
        assert rows[name]["outcome"] in ("cancelled", "ok")
    assert set(rows) == {*told.usage, *told.left}
    for row in rows.values():
        if row["attempts"]:
            for name in (*TOKENS, "cached_tokens", "device_ns"):
                assert sum(attempt[name] for attempt in row["attempts"]) == row[name], (name, row)
        assert row["replica"].startswith("parrot")
    counted = {
        "prompt_tokens": "toque_prompt_tokens_total",
        "cached_tokens": "toque_prompt_tokens_cached_total",
        "completion_tokens": "toque_generation_tokens_total",
    }
    for name, metric in counted.items():
        assert sum(row[name] for row in rows.values()) == server.metric(metric), metric
    first_tokens = server.metric("toque_time_to_first_token_seconds_count")
    assert first_tokens == sum(row["ttft_us"] > 0 for row in rows.values())
    assert server.metric("toque_e2e_request_latency_seconds_count") == sum(
        r["outcome"] == "ok" for r in rows.values()
    )


@pytest.mark.slow
def test_the_books_are_right_whoever_is_killed(parrot_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "toque.yaml"
    config.write_text(CONFIG)
    home = tmp_path / "home"
    told = Told()
    with serving(parrot_folder, "--config", str(config), name="parrot", home=home) as server:
        # Nobody leaves and nobody dies: the engines have counted the same.
        prompts = [f"{'abc' * n}\n" for n in range(1, 7)]
        for n, prompt in enumerate(prompts):
            told.whole(server.post("/v1/completions", prompt=prompt, max_tokens=4, n=1 + n % 2))
        rows = _rows(server)
        _check(rows, told, server)
        engine = server.get("/admin/v1/stats").json()["models"]["parrot"]["engine"]
        assert engine["generated_tokens"] == sum(row["completion_tokens"] for row in rows.values())
        sequences = sum(row["prompt_tokens"] * row["choices"] for row in rows.values())
        assert engine["prompt_tokens"] == sequences

        # Everything that clients do, while one replica dies, and later the other.
        workers = _at_once(lambda rng: _something(server, told, rng), threads=4, rounds=14, seed=0)
        long = {"prompt": "go!", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
        workers += _at_once(lambda rng: _stream(server, told, long), threads=2, rounds=2, seed=50)
        steady = Steady()
        endless = long | {"max_tokens": 16_000}

        def keep_on() -> None:
            while not steady.over.is_set() and not told.failed:
                _stream(server, told, endless, steady=steady)

        workers.append(threading.Thread(target=keep_on))
        workers[-1].start()
        for _ in range(2):
            time.sleep(1.0)
            server.until(lambda: len(server.replicas()) == 2 and server.get("/ready").status_code == 200, 60)
            _goes_on(server, steady, told)
            # The one that was there before: where the endless stream is, one of the two deaths disturbs it.
            min(server.replicas(), key=lambda replica: replica.create_time()).send_signal(signal.SIGKILL)
        _goes_on(server, steady, told)
        steady.over.set()
        for worker in workers:
            worker.join(120)
        assert not any(worker.is_alive() for worker in workers)
        rows = _rows(server)
        _check(rows, told, server)
        assert told.replayed > 0
        assert told.refused > 0
        moved = [row for row in rows.values() if any(a["outcome"] == "moved" for a in row["attempts"])]
        assert moved, "nobody was disturbed"
        life = "\n".join(run("logs", row["request_id"], home=home).stdout for row in moved[:3])
        assert "migrated after" in life or "retried on" in life

        # The gateway dies with a request open.
        known = set(rows)
        body = {"model": "parrot", "stream": True, **long, "max_tokens": 16_000}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as stream:
            asked = time.monotonic()
            lines = stream.iter_lines()  # while it lives the connection does
            for line in lines:
                if line and time.monotonic() - asked > 0.1:
                    if server.noted():
                        break
                    asked = time.monotonic()
            server.process.kill()
            server.process.wait()
    with serving(parrot_folder, "--config", str(config), name="parrot", home=home) as server:
        told_after = Told()
        told_after.whole(server.post("/v1/completions", prompt="x\n", max_tokens=3))
        server.until(lambda: server.metric("toque_ledger_rows_total") >= 1)
        server.until(lambda: all(row["outcome"] != "open" for row in _rows(server).values()))
        rows = _rows(server)
    assert len(rows) == len(known) + 2
    (lost,) = [row for row in rows.values() if row["outcome"] == "lost"]
    assert lost["completion_tokens"] >= 1
    assert lost["list_nano"] == 0
    assert known < set(rows)
    done = run("usage", "--by", "endpoint", "--json", "--config", str(config), home=home)
    total = json.loads(done.stdout)["total"]
    assert total["requests"] == len(rows)
    for name in (*TOKENS, "cached_tokens"):
        assert total[name] == sum(row[name] for row in rows.values())
