"""What a routing decision costs, by policy and number of replicas.

    python benchmarks/routing.py [--replicas 100] [--requests 20000]

The pool's own work from a request to the session it is given to: nothing is sent. Prompts are chats of 1,000 tokens
of which half begin alike; every replica reports its load between decisions, as often as real ones do at 500 requests
a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable

from toque.routing.base import OnRoute, ReplicaEntry, ReplicaState, RoutingTable
from toque.routing.journey import Journey, MoveBounds
from toque.routing.policies import POLICIES
from toque.routing.pool import ReplicaPool
from toque.types import EngineRequest, EngineStats, ModelCard, SamplingParams, SequenceOutput


class SilentSession:
    """Ready, and never asked for anything."""

    state = ReplicaState.READY
    reason = ""
    silent_s = 0.0
    card: ModelCard | None = None

    def __init__(self) -> None:
        self.on_stats: Callable[[EngineStats], None] | None = None

    def start(self) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        raise NotImplementedError
        yield


async def measure(policy: str, replicas: int, requests: int) -> list[float]:
    """Processor seconds of each decision: other processes may take the core away in the middle of one."""
    source = random.Random(1)
    sessions = [SilentSession() for _ in range(replicas)]
    left = iter(sessions)
    pool = ReplicaPool("m", open_session=lambda entry, on_change: next(left))
    entries = tuple(ReplicaEntry(f"r{i}", 1, f"/r{i}", ReplicaState.READY) for i in range(replicas))
    pool.apply(RoutingTable("m", entries, policy=policy))
    shared = [[source.randrange(50_000) for _ in range(1000)] for _ in range(50)]
    running: list[object] = []
    taken = []
    for number in range(requests):
        begun = source.choice(shared)[: 1000 * (number % 2)]
        prompt = tuple(begun + [source.randrange(50_000) for _ in range(1000 - len(begun))])
        request = EngineRequest(str(number), prompt, SamplingParams())
        reporting = sessions[source.randrange(replicas)]
        assert reporting.on_stats is not None
        reporting.on_stats(EngineStats(running=source.randrange(8), kv_blocks_total=100))
        started = time.thread_time()
        journey = Journey(request, None, None, MoveBounds())
        target = pool._pick(journey)
        assert target is not None
        journey.sent(target.key, "")
        target.load.sent()
        taken.append(time.thread_time() - started)
        running.append(target.load)
        if len(running) > 4 * replicas:
            running.pop(source.randrange(len(running))).ended()  # type: ignore[attr-defined]
    await pool.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 10, 100])
    parser.add_argument("--requests", type=int, default=5000)
    args = parser.parse_args()
    print(f"{'policy':12} {'replicas':>8} {'median':>9} {'p99':>9}")
    for policy in POLICIES:
        for replicas in args.replicas:
            taken = sorted(asyncio.run(measure(policy, replicas, args.requests)))
            median, p99 = statistics.median(taken), taken[int(0.99 * len(taken))]
            print(f"{policy:12} {replicas:8d} {median * 1e6:6.1f} us {p99 * 1e6:6.1f} us")


if __name__ == "__main__":
    main()
