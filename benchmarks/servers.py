"""Rows of servers: the same loads on each, in turns, by the client of `toque bench`; start, memory, running streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engines import verdict
from floors import COLD_START, PREFILLING, RESIDENT, SERVER_FLOORS, UNDER_LOAD, Floor
from toque.bench.benchmark import benchmark
from toque.bench.client import Record, Target, chat, send
from toque.bench.local_server import LocalServer, free_port, running, toque_command, toque_server
from toque.bench.plan import Plan
from toque.bench.report import Percentiles
from toque.errors import ToqueError
from workers import ROOT, SERVERS, TOQUE, Worker

_METRICS = {
    "requests/s": (("requests_per_second",), 1.0),
    "output tok/s": (("output_tokens_per_second",), 1.0),
    "TTFT p50, ms": (("ttft", "p50"), 1e3),
    "TTFT p95, s": (("ttft", "p95"), 1.0),
    "ITL p50, ms": (("itl", "p50"), 1e3),
    "ITL p99, ms": (("itl", "p99"), 1e3),
}


@dataclass(frozen=True)
class Load:
    """A standard load of `toque bench`, and the slots a server with fixed slots should have for it."""

    name: str
    requests: int
    slots: int
    tokens: int  # of a slot

    def plan(self, seed: int) -> Plan:
        return Plan(loads=(self.name,), requests=self.requests, seed=seed)


def loads(quick: bool) -> list[Load]:
    if quick:
        return [
            Load("sequential", 5, 1, 2048),
            Load("concurrent", 24, 24, 512),
            Load("shared-prefix", 12, 8, 2048),
        ]
    return [
        Load("sequential", 20, 1, 2048),
        Load("concurrent", 100, 64, 512),
        Load("shared-prefix", 50, 8, 2048),
    ]


@contextlib.contextmanager
def serving(
    name: str, model: Path, threads: int, slots: int, tokens: int, *options: str
) -> Iterator[LocalServer]:
    """Toque with its defaults (and ``options``), or a peer with that many slots."""
    if name == "toque":
        with toque_server(str(model), "--threads", str(threads), *options) as server:
            yield server
    else:
        port = free_port()
        command = peer_command(name, model, port, threads, slots, tokens)
        with running(command, port, ready="/health", name=f"{name}'s server", environment=quiet()) as server:
            yield server


def peer_command(name: str, model: Path, port: int, threads: int, slots: int, tokens: int) -> list[str]:
    engine = SERVERS[name]
    script = str(ROOT / "benchmarks" / "peers" / engine.worker)
    return [engine.python(), script, str(model), str(port), str(threads), str(slots), str(tokens)]


def quiet() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def target(server: LocalServer) -> Target:
    return Target.parse(server.url, server.served, server.key)


def compare(
    models: dict[str, Path], threads: int, rounds: int, quick: bool, engine: dict[str, float]
) -> list[dict[str, Any]]:
    """Rows of every load and metric. ``models``: server → its file. A peer that cannot run is left out and named.

    ``engine``: the bare engine's tokens/s in the rows of `floors.MODELS`, from which bounds follow; may be empty.
    """
    rows = []
    for load in loads(quick):
        found: dict[str, dict[str, list[float]]] = {metric: {} for metric in _METRICS}
        cannot: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            up = {}
            for name, model in models.items():
                try:
                    up[name] = stack.enter_context(serving(name, model, threads, load.slots, load.tokens))
                except ToqueError as error:
                    cannot[name] = error.message
            for turn in range(rounds):
                order = list(up.items())
                for name, server in order if turn % 2 == 0 else order[::-1]:
                    (result,) = benchmark(target(server), load.plan(turn))["results"]
                    if result["summary"]["failed"]:
                        cannot[name] = f"{load.name}: {result['summary']['messages'][0]}"
                    for metric, (path, scale) in _METRICS.items():
                        value: Any = result["summary"]
                        for part in path:
                            value = value[part]
                        found[metric].setdefault(name, []).append(value * scale)
        best = bounds(load, engine)
        for metric, values in found.items():
            floor = SERVER_FLOORS.get((load.name, metric), Floor())
            rows.append(_row(f"{load.name}: {metric}", values, floor, cannot, bound=best.get(metric)))
    return rows


def bounds(load: Load, engine: dict[str, float]) -> dict[str, float]:
    """What the bare engine's own speed leaves a server at best, which then has no gateway, no client and no queue."""
    rows = {"prefill": "prefill 512", 1: "decode batch 1", 16: "decode batch 16", 64: "decode batch 64"}
    speeds = {key: next((v for n, v in engine.items() if n.startswith(f"{name},") or n == name), 0.0)
              for key, name in rows.items()}  # fmt: skip
    if not all(speeds.values()):
        return {}
    prefill = 99 / speeds["prefill"]
    if load.name == "sequential":
        return {"requests/s": 1 / (prefill + 64 / speeds[1]), "TTFT p50, ms": 1e3 * prefill}
    rate = 64 / (prefill + 64 / speeds[64 if load.name == "concurrent" else 16])
    best = {"output tok/s": rate}
    if (
        load.name == "concurrent"
    ):  # all are there at once, so the last of 95 % waits for the prompts before it
        best["TTFT p95, s"] = 0.95 * load.requests * prefill
    return best


def _row(
    name: str,
    values: dict[str, list[float]],
    floor: Floor,
    cannot: dict[str, str],
    *,
    bound: float | None = None,
) -> dict[str, Any]:
    unit = name.rsplit(", ", 1)[-1] if ", " in name else name.rsplit(": ", 1)[-1]
    figures = {server: statistics.median(v) for server, v in values.items()}
    ours = values.get("toque", [])
    ratios = {
        server: statistics.median(a / b if b else 0.0 for a, b in zip(ours, theirs, strict=False))
        for server, theirs in values.items()
        if server != "toque" and ours
    }
    told = ""
    if "toque" in figures:
        told = verdict(figures["toque"], floor, unit, bound=bound, limit="bare engine")
    return {
        "name": name, "unit": unit, "figures": figures, "ratios": ratios, "all": values, "failed": cannot,
        "floor": floor.text(unit), "verdict": told,
    }  # fmt: skip


def tree_pss(pid: int) -> float:
    """MB that a process and its children have resident; pages shared with others count by their share."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(p.memory_full_info().pss for p in family) / 1e6


def resident(models: dict[str, Path], threads: int) -> dict[str, Any]:
    """After load and one short answer, with room for 8 streams of 8k tokens."""
    values: dict[str, list[float]] = {}
    cannot: dict[str, str] = {}
    for name, model in models.items():
        options = ("--context-length", "8192", "--max-sequences", "8") if name == "toque" else ()
        try:
            with serving(name, model, threads, 8, 8192, *options) as server:
                asyncio.run(chat(target(server), "Hello", 4))
                values[name] = [tree_pss(server.pid)]
        except ToqueError as error:
            cannot[name] = error.message
    return _row("resident memory after load, MB", values, RESIDENT, cannot)


def cold_start(models: dict[str, Path], threads: int, rounds: int) -> dict[str, Any]:
    """Process start to the first token over HTTP; the first start of each fills the page cache and is not counted."""
    values: dict[str, list[float]] = {}
    cannot: dict[str, str] = {}
    for turn in range(rounds + 1):
        for name, model in models.items():
            try:
                seconds = first_token(name, model, threads)
            except (OSError, RuntimeError) as error:
                cannot[name] = str(error)
                continue
            if turn:
                values.setdefault(name, []).append(seconds)
    return _row("process start to first token, s", values, COLD_START, cannot)


def first_token(name: str, model: Path, threads: int) -> float:
    port, key = free_port(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="toque-bench-") as folder:
        if name == "toque":
            command, environment = toque_command(str(model), port, key, folder, "--threads", str(threads))
        else:
            command, environment = peer_command(name, model, port, threads, 1, 2048), quiet()
        where = Target("127.0.0.1", port, "/v1/", model.stem if name == "toque" else model.name, key)
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return asyncio.run(_until_answered(where, process)).first - began
        finally:
            process.terminate()
            process.wait(30)


async def _until_answered(where: Target, process: subprocess.Popen[bytes]) -> Record:
    deadline = time.monotonic() + 60
    while True:
        record = await chat(where, "Hello", 1)
        if record.ok and record.arrivals:
            return record
        if process.poll() is not None:
            raise RuntimeError(f"ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"no token after 60 s; the last attempt: {record.kind} {record.error}")
        await asyncio.sleep(0.005)


def under_load(model: Path, threads: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Decode rate of 16 streams in the server while their clients run on the same cores, over the bare engine's."""
    streams, context, outputs = 16, 128, 64 if quick else 128
    plan = Plan(
        profiles=("concurrent",),
        concurrency=(streams,),
        requests=streams,
        inputs=str(context),
        outputs=str(outputs),
    )
    command = {"op": "decode", "batch": streams, "context": context + outputs // 2, "steps": 8}
    quiet_rates, loaded, shares = [], [], []
    room = streams * (context + outputs)
    with Worker(TOQUE, model, threads, room, streams) as worker, toque_server(str(model)) as server:
        worker.ask(dict(command))
        for turn in range(rounds):
            alone = streams * command["steps"] / worker.ask(dict(command))["seconds"]
            (result,) = benchmark(target(server), Plan(**{**_fields(plan), "seed": turn}))["results"]
            busy = streams / result["summary"]["itl"]["p50"]
            quiet_rates.append(alone)
            loaded.append(busy)
            shares.append(busy / alone)
    row = _row("decode of 16 streams, server and clients over bare engine", {"toque": shares}, UNDER_LOAD, {})
    return row | {
        "unit": "x",
        "floor": UNDER_LOAD.text("x"),
        "quiet_tok_s": quiet_rates,
        "loaded_tok_s": loaded,
    }


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def prefilling(model: Path, threads: int, quick: bool) -> dict[str, Any]:
    """Gaps of 8 running streams while a long prompt is prefilled: p99 over p50, and both over the quiet p50."""
    words, outputs = (2000, 300) if quick else (7000, 1000)
    name = f"8 streams while {words:,} words are prefilled: ITL p99 over p50"
    with toque_server(str(model), "--threads", str(threads)) as server:
        before, during = asyncio.run(_gaps(target(server), words, outputs))
    if len(during) < 100:
        return _row(name, {}, Floor(), {"toque": f"only {len(during)} gaps of running streams were seen"})
    quiet, busy = Percentiles.of(before), Percentiles.of(during)
    row = _row(name, {"toque": [busy.p99 / busy.p50]}, PREFILLING, {})
    return row | {
        "unit": "x", "floor": PREFILLING.text("x"), "gaps": len(during), "itl_p50_ms": busy.p50 * 1e3,
        "itl_p99_ms": busy.p99 * 1e3, "quiet_itl_p50_ms": quiet.p50 * 1e3,
    }  # fmt: skip


async def _gaps(where: Target, words: int, outputs: int) -> tuple[list[float], list[float]]:
    def ask(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    tasks = [asyncio.create_task(send(where, ask(f"Tell story number {i}."), outputs)) for i in range(8)]
    await asyncio.sleep(2.0)  # for all of them to stream
    long = await send(where, ask("river " * words), 1)
    streams = await asyncio.gather(*tasks)
    pairs = [(a, b) for r in streams for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]
    before = [b - a for a, b in pairs if long.sent - 1.0 < a and b < long.sent]
    return before, [b - a for a, b in pairs if b > long.sent and a < long.done]


def servers_asked(peers: Sequence[str]) -> list[str]:
    return ["toque", *(p for p in peers if p in SERVERS)]
