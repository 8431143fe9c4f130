"""What a tenant that floods a server costs another tenant's first token: quiet and flooded rounds, interleaved.

    python benchmarks/fairness.py [MODEL.gguf] [--max-sequences 8 64] [--rounds 3] [--http]

In the engine: one tenant keeps it full of requests (100 tokens in, 200 out), the other asks now and then (100 in, 8
out); every request of the other comes in the middle of a step. With ``--http`` the same against `toque serve` with
keys of two tenants, from this process, whose own work is on the same CPU. Prints the median TTFT of both, and the
ratio, which should be under 1.5; and the longest gap in the flood's streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from toque.bench.client import Record, Target, chat
from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.types import EngineRequest, SamplingParams

TOQUE = [sys.executable, "-c", "from toque.cli.main import main; main()"]
PROMPT, ANSWER, FLOOD_ANSWER = 100, 8, 200
PER_ROUND = 8  # requests of the other tenant


@dataclass
class Result:
    quiet: list[float] = field(default_factory=list)
    flooded: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two tokens of a stream of the flood

    def line(self, name: str) -> str:
        quiet, flooded = (1e3 * statistics.median(each) for each in (self.quiet, self.flooded))
        gaps = sorted(self.gaps)
        p50, p99 = (1e3 * gaps[int(len(gaps) * share)] for share in (0.5, 0.99))
        return (
            f"{name}: TTFT quiet {quiet:.0f} ms, flooded {flooded:.0f} ms, ratio {flooded / quiet:.2f}; "
            f"the flood's gaps p50 {p50:.0f} ms, p99 {p99:.0f} ms"
        )


class InEngine:
    """Both tenants on an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random(7)
        self._count = 0
        self._last: dict[str, float] = {}

    def _add(self, tenant: str, answer: int) -> str:
        self._count += 1
        name = f"{tenant}{self._count}"
        prompt = tuple(self._random.randrange(1000, 40_000) for _ in range(PROMPT))
        sampling = SamplingParams(max_tokens=answer, seed=self._count, ignore_eos=True)
        self._engine.add(EngineRequest(name, prompt, sampling, tenant=tenant))
        return name

    def round(self, flood: int, ttfts: list[float], gaps: list[float]) -> None:
        alive = {self._add("flood", FLOOD_ANSWER) for _ in range(flood)}
        if flood:
            for _ in range(40):
                self._step(alive, [])
        for _ in range(PER_ROUND):
            began = time.perf_counter()
            if flood:
                self._step(alive, gaps)
                began = (began + time.perf_counter()) / 2
            name = self._add("other", ANSWER)
            while name not in self._step(alive, gaps):
                pass
            ttfts.append(time.perf_counter() - began)
            for _ in range(30 if flood else ANSWER):
                self._step(alive, gaps)
        for name in alive:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()

    def _step(self, alive: set[str], gaps: list[float]) -> set[str]:
        """A step; the flood replaces each of its requests that ended. Returns who got tokens."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if name in alive:
                if name in self._last:
                    gaps.append(now - self._last[name])
                self._last[name] = now
                if output.finish_reason is not None:
                    alive.remove(name)
                    alive.add(self._add("flood", FLOOD_ANSWER))
        return {output.request_id for output in outputs if output.tokens}


async def over_http(url: str, keys: list[str], flood: int, rounds: int) -> Result:
    theirs, ours = (Target.parse(url, "m", key) for key in keys)
    result = Result()
    rng = random.Random(3)

    def text() -> str:
        return " ".join(str(rng.randrange(10_000)) for _ in range(PROMPT // 5))

    async def endless(records: list[Record]) -> None:
        while True:
            records.append(await chat(theirs, text(), FLOOD_ANSWER))

    async def ask(ttfts: list[float]) -> None:
        for _ in range(PER_ROUND):
            record = await chat(ours, text(), ANSWER)
            assert record.ttft is not None, record.error
            ttfts.append(record.ttft)
            await asyncio.sleep(0.5)

    await ask([])
    for _ in range(rounds):
        await ask(result.quiet)
        records: list[Record] = []
        streams = [asyncio.create_task(endless(records)) for _ in range(flood)]
        await asyncio.sleep(3)
        await ask(result.flooded)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        result.gaps += [gap for record in records for gap in record.gaps]
        await asyncio.sleep(1)
    return result


@contextlib.contextmanager
def served(model: Path, max_sequences: int) -> Iterator[tuple[str, list[str]]]:
    """A server, and a key of each of two tenants."""
    with tempfile.TemporaryDirectory(prefix="toque-fairness-") as home:
        environment = {**os.environ, "TOQUE_HOME": home}
        keys = [
            subprocess.run(
                [*TOQUE, "keys", "create", tenant],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for tenant in ("flood", "other")
        ]
        arguments = ["serve", f"m={model}", "--port", "0", "--max-sequences", str(max_sequences)]
        server = subprocess.Popen([*TOQUE, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            ready = re.search(r"at (http://\S+)/v1 ", server.stdout.readline())
            assert ready is not None, "the server did not start"
            yield ready.group(1), keys
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    parser.add_argument("--max-sequences", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--http", action="store_true")
    args = parser.parse_args()
    for places in args.max_sequences:
        name = f"{places} places, {places + 32} requests in the flood"
        if args.http:
            with served(args.model, places) as (url, keys):
                print(asyncio.run(over_http(url, keys, places + 32, args.rounds)).line(f"{name}, over HTTP"))
            continue
        engine = load_engine(args.model, EngineOptions(max_sequences=places))
        run, result = InEngine(engine), Result()
        run.round(0, [], [])
        for _ in range(args.rounds):
            run.round(0, result.quiet, [])
            run.round(places + 32, result.flooded, result.gaps)
        engine.close()
        print(result.line(name))


if __name__ == "__main__":
    main()
