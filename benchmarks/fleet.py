"""How fast the fleet reacts, seen by a client: ``python benchmarks/fleet.py MODEL [--second MODEL2] [--rounds 9]``.

Starts ``toque serve chat=MODEL`` on loopback and measures with real requests:

- wake: from a request for a sleeping model to its first token;
- swap: the longest that a request waits for its first token while the weights are swapped in place;
- death: from ``kill -9`` of a replica until its successor's process is there, and until it answers;
- migration: the longest pause of a stream whose replica is killed, while another replica runs, and while none does;
- recovery: the longest pause (or wait) of each of many requests that a death hits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

LONG, SHORT = 160, 8  # tokens of an answer
SETTLED_S = 11.0  # a replica that was ready for ten seconds is started again at once


class Fleet:
    """One server's completions and administration."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def stream(self, tokens: int, reached: asyncio.Event | None = None, at: int = 40) -> list[float]:
        """Times of the request and of each token; ``reached`` is set when so many have come."""
        body = {"model": "chat", "prompt": "The sea is", "stream": True}
        body |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        times = [time.perf_counter()]
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if '"error"' in line:
                        raise RuntimeError(line)
                    times.append(time.perf_counter())
                    if reached is not None and len(times) > at:
                        reached.set()
            if answer.status_code != 200 or len(times) == 1:
                raise RuntimeError(f"answered {answer.status_code}")
        return times

    async def admin(self, path: str, body: object = None) -> Any:
        answer = await self._client.request("GET" if body is None else "POST", f"/admin/v1/{path}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def replicas(self) -> list[Any]:
        found: list[Any] = (await self.admin("replicas"))["data"]
        return found

    async def until(self, condition: Callable[[Any], bool], what: str, seconds: float = 60.0) -> None:
        end = time.perf_counter() + seconds
        while not condition(await self.admin(what)):
            if time.perf_counter() > end:
                raise TimeoutError(f"{what} did not become as expected: {await self.admin(what)}")
            await asyncio.sleep(0.02)

    async def scale(self, low: int, high: int, **scaling: object) -> None:
        spec = (await self.admin("deployments/chat"))["spec"]
        spec["scaling"] |= {"min_replicas": low, "max_replicas": high, **scaling}
        await self.admin("deployments", spec)
        if low:
            await self.until(
                lambda view: (
                    view["ready"] == view["replicas"] == view["target"] and low <= view["ready"] <= high
                ),
                "deployments/chat",
            )


async def wake(fleet: Fleet, rounds: int, server: int) -> tuple[list[float], list[float]]:
    """Seconds by the clock, and of CPU time in the server and the replica: about what it takes on an idle machine."""
    await fleet.scale(0, 1, downscale_to_zero_delay_s=0.2)
    seconds, work = [], []
    for _ in range(rounds):
        await fleet.until(
            lambda view: view["status"] == "asleep" and not view["replicas"], "deployments/chat"
        )
        before = cpu_s(server)
        times = await fleet.stream(1)
        (replica,) = await fleet.replicas()
        seconds.append(times[1] - times[0])
        work.append(cpu_s(server) - before + cpu_s(int(replica["handle"])))
    await fleet.scale(1, 1, downscale_to_zero_delay_s=300)
    return seconds, work


async def swap(fleet: Fleet, rounds: int, models: list[str]) -> list[float]:
    found = []
    for number in range(rounds):
        waits: list[float] = []
        stop = asyncio.Event()

        async def arrive(into: list[float], until: asyncio.Event) -> None:
            async def one() -> None:
                times = await fleet.stream(SHORT)
                into.append(times[1] - times[0])

            async with asyncio.TaskGroup() as group:
                while not until.is_set():
                    group.create_task(one())
                    await asyncio.sleep(0.1)

        arriving = asyncio.create_task(arrive(waits, stop))
        await asyncio.sleep(0.5)
        body = {"model": models[(number + 1) % 2], "policy": {"strategy": "swap"}}
        await fleet.admin("rollouts/chat", body)
        await fleet.until(lambda view: view["phase"] in ("done", "returned"), "rollouts/chat")
        assert (await fleet.admin("rollouts/chat"))["phase"] == "done"
        await asyncio.sleep(0.3)
        stop.set()
        await arriving
        found.append(max(waits))
    return found


async def death(fleet: Fleet, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until a new process, and until it is ready."""
    there, ready = [], []
    for _ in range(rounds):
        (replica,) = await fleet.replicas()
        os.kill(int(replica["handle"]), signal.SIGKILL)
        begun = time.perf_counter()
        successor: Any = replica
        while successor["handle"] in (replica["handle"], ""):
            await asyncio.sleep(0.01)
            (successor,) = await fleet.replicas()
        there.append(time.perf_counter() - begun)
        while successor["state"] != "ready":
            await asyncio.sleep(0.01)
            (successor,) = await fleet.replicas()
        ready.append(time.perf_counter() - begun)
        await asyncio.sleep(SETTLED_S)
    return there, ready


async def migration(fleet: Fleet, rounds: int) -> list[float]:
    """The longest pause of a stream whose replica is killed at its 40th token."""
    found = []
    for _ in range(rounds):
        reached = asyncio.Event()
        streaming = asyncio.create_task(fleet.stream(LONG, reached))
        await reached.wait()
        os.kill(int((await _busiest(fleet))["handle"]), signal.SIGKILL)
        times = await streaming
        found.append(max(b - a for a, b in pairwise(times[1:])))
        await fleet.until(lambda view: view["ready"] == view["target"], "deployments/chat")
        await asyncio.sleep(SETTLED_S)
    return found


async def recovery(fleet: Fleet, rounds: int) -> list[float]:
    """The longest wait or pause of each of 16 requests, a replica of two being killed among them."""
    found: list[float] = []
    for _ in range(rounds):
        running = [asyncio.create_task(fleet.stream(64)) for _ in range(16)]
        await asyncio.sleep(0.4)
        os.kill(int((await _busiest(fleet))["handle"]), signal.SIGKILL)
        for times in await asyncio.gather(*running):
            found.append(max(b - a for a, b in pairwise(times)))
        await fleet.until(lambda view: view["ready"] == view["target"], "deployments/chat")
        await asyncio.sleep(SETTLED_S)
    return found


async def _busiest(fleet: Fleet) -> Any:
    """The replica that has used most CPU time of late: the one that a single stream runs on."""
    replicas = [replica for replica in await fleet.replicas() if replica["state"] == "ready"]
    before = {replica["id"]: cpu_s(int(replica["handle"])) for replica in replicas}
    await asyncio.sleep(0.1)
    return max(replicas, key=lambda replica: cpu_s(int(replica["handle"])) - before[replica["id"]])


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


PARTS = ("wake", "swap", "death", "restart", "move", "recovery")


async def measure(url: str, server: int, models: list[str], rounds: int, parts: list[str]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        fleet = Fleet(client)
        await fleet.stream(SHORT)
        if "wake" in parts:
            seconds, work = await wake(fleet, rounds, server)
            _print("wake from zero to the first token", seconds)
            _print("of it CPU time, server and replica", work)
        if "swap" in parts:
            _print("longest wait during a swap in place", await swap(fleet, rounds, models))
        if "death" in parts:
            there, ready = await death(fleet, rounds)
            _print("death to the successor's process", there)
            _print("death to a ready successor", ready)
        if "restart" in parts:
            _print("pause of a stream, restarted in place", await migration(fleet, rounds))
        if "move" in parts or "recovery" in parts:
            await fleet.scale(2, 2)
        if "move" in parts:
            _print("pause of a stream, moved to another", await migration(fleet, rounds))
        if "recovery" in parts:
            _print("longest pause of 16 streams, two replicas", await recovery(fleet, rounds))


def _print(name: str, found: list[float]) -> None:
    ordered = sorted(found)
    p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    print(f"| {name} | {median(found):.2f} s | {p99:.2f} s | {len(found)} |", flush=True)


@contextmanager
def serving(model: str, threads: int) -> Any:
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "toque",
                    "serve",
                    f"chat={model}",
                    "--port",
                    "0",
                    "--threads",
                    str(threads),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TOQUE_HOME": home},
            )
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                found = re.search(r"http://[^/ ]+", said)
                if found is None:
                    raise RuntimeError(f"it did not start: {said}{log.read_text()}")
                yield found[0], process.pid
            finally:
                process.terminate()
                process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--second", type=Path, help="to swap to; a copy of the first, if not given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=0, help="of each replica; 0: as many as there are")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # and end the server on the way
    with tempfile.TemporaryDirectory() as folder:
        second = given.second
        if second is None:
            second = Path(folder) / "second.gguf"
            second.write_bytes(given.model.read_bytes())
        models = [str(given.model.absolute()), str(second.absolute())]
        with serving(models[0], given.threads) as (url, server):
            print(f"| {given.model.name} | median | p99 | of |\n|---|---|---|---|", flush=True)
            asyncio.run(measure(url, server, models, given.rounds, list(given.only)))


if __name__ == "__main__":
    main()
