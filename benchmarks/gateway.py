"""What the gateway itself costs, against an engine that answers instantly.

    python benchmarks/gateway.py [--model FILE.gguf] [--seconds 3] [--rounds 3]

The server runs in a process of its own with the real tokenizer and chat template of ``--model``, a ledger, and a
scripted engine; CPU time is that process's user + system time; medians of the rounds are printed. Bounds: under 6 ms
of CPU a request of 100 prompt tokens and 64 streamed tokens, under 60 µs a streamed token, 3 ms to the first token,
and under 15 % of a core for 64 streams of 25 tokens/s each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from toque.bench.client import Record, Target, chat
from toque.routing.base import OnRoute
from toque.routing.fake import FakeEngineClient, Script
from toque.types import EngineRequest, FinishReason, ModelCard, SequenceOutput

ROOT = Path(__file__).resolve().parent.parent
PACE = 25  # tokens per second of a paced stream
TEXT = " ".join(f"word{i % 37} and" for i in range(33))  # about 100 tokens


class SteppedEngine(FakeEngineClient):
    """All running requests get their next token in the same step, as from a real engine: one wakeup, many streams."""

    def __init__(self, tokens: list[int], steps_per_second: float) -> None:
        super().__init__()
        self._tokens = tokens
        self._period = 1 / steps_per_second
        self._step = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        if self._clock is None:
            self._clock = asyncio.create_task(self._tick())
        limit = request.sampling.max_tokens or 0
        for i in range(limit):
            await self._step.wait()
            last = i == limit - 1
            token = self._tokens[i % len(self._tokens)]
            yield SequenceOutput(
                request.request_id, [token], finish_reason=FinishReason.LENGTH if last else None
            )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            step, self._step = self._step, asyncio.Event()
            step.set()


def server(model: Path, folder: str, pipe: Connection) -> None:
    """The child: a gateway over two scripted engines, one that answers at once and one with a human pace.

    It is ended by a signal, so the ledger is not closed: ``folder`` is the parent's to remove.
    """
    from toque.config import load_settings
    from toque.formats import load_checkpoint
    from toque.gateway.app import create_app
    from toque.gateway.deployment import FixedDeployment
    from toque.gateway.listen import bind
    from toque.gateway.server import GatewayServer
    from toque.monitor.ledger.ledger import Ledger
    from toque.text.template import load_template
    from toque.text.tokenizer import load_tokenizer

    checkpoint = load_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.encode(" the quick brown fox jumps over the lazy dog", add_special=False)

    tokens = [words[i % len(words)] for i in range(4096)]
    settings = load_settings({"server.port": 0}, environ={})
    card = ModelCard("m", "llama", 1, "Q4_1", 8192, checkpoint.config.vocab_size)
    template = load_template(checkpoint, tokenizer)
    engines = {"instant": FakeEngineClient(Script(tokens)), "paced": SteppedEngine(words, PACE)}
    deployments = {
        name: FixedDeployment(name, engine, tokenizer, template, card, settings.limits)
        for name, engine in engines.items()
    }
    app = create_app(deployments, settings)
    ledger = Ledger(Path(folder))
    app.state.gateway.ledger = ledger
    ledger.start()
    listener = bind(settings.server, False)
    pipe.send(listener.getsockname()[1])
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(GatewayServer(app, settings.server, 65536).serve([listener]))


async def many(target: Target, tokens: int, count: int, at_once: int) -> list[Record]:
    records: list[Record] = []
    waiting = iter(range(count))

    async def worker() -> None:
        for _ in waiting:
            records.append(await chat(target, TEXT, tokens))

    await asyncio.gather(*(worker() for _ in range(at_once)))
    bad = [record for record in records if not record.ok or record.completion_tokens != tokens]
    assert not bad, bad[0]
    return records


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(url: str, process: psutil.Process, seconds: float) -> dict[str, float]:
    instant, paced = Target.parse(url, "instant"), Target.parse(url, "paced")
    result: dict[str, float] = {}

    async def cpu_of(tokens: int, count: int) -> float:
        before = cpu(process)
        await many(instant, tokens, count, 4)
        return (cpu(process) - before) / count

    await many(instant, 64, 50, 4)  # warm up
    one, full, long = await cpu_of(1, 200), await cpu_of(64, 200), await cpu_of(512, 50)
    result["request_of_64_tokens_ms"] = full * 1e3
    result["request_of_1_token_ms"] = one * 1e3
    result["token_us"] = (long - one) / 511 * 1e6
    result["ttft_p50_ms"] = statistics.median(
        (r.first - r.sent) * 1e3 for r in await many(instant, 1, 200, 1)
    )
    before, start = cpu(process), time.perf_counter()
    await many(paced, int(PACE * seconds), 64, 64)
    result["core_of_64_paced_streams"] = (cpu(process) - before) / (time.perf_counter() - start)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = tempfile.TemporaryDirectory(prefix="toque-gateway-benchmark-")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=server, args=(arguments.model, folder.name, theirs), daemon=True)
    child.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        assert child.pid is not None
        process = psutil.Process(child.pid)
        rounds = [asyncio.run(measure(url, process, arguments.seconds)) for _ in range(arguments.rounds)]
        medians = {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}
        print(json.dumps(medians, indent=2))
    finally:
        child.terminate()
        child.join(5)
        folder.cleanup()


if __name__ == "__main__":
    main()
