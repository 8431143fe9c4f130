"""What it costs to measure: CPU of the gateway per request, without and with its metrics, ledger, events and spans.

    python benchmarks/monitoring.py [--model FILE.gguf] [--rounds 5] [--requests 150] [--served 128]

Four servers run side by side over the same scripted engine (64 streams at once, 64 tokens each, with the routes and
step events of a real one) and are measured in turn, so that whatever else the machine does hits all of them:

    nothing   a meter that does nothing
    metrics   counters, histograms, percentiles
    ledger    and a row in the ledger, and the life of each request in the event log
    tracing   and OpenTelemetry spans of every request, sent to a collector on this machine

Printed is the median of the rounds' differences to ``nothing``, and what part it is of the CPU time that a request
takes in all (gateway and replica) when ``--model`` itself is served to 64 streams: on a machine that is busy, that
part is what throughput loses. Bounds: 3 % for the ledger, 6 % with tracing.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from gateway import cpu, many
from toque.bench.client import Target
from toque.routing.base import OnRoute, RouteEvent, RouteKind
from toque.routing.fake import FakeEngineClient, Script
from toque.types import EngineRequest, ModelCard, SequenceOutput, StepEvent, StepEventKind

ROOT = Path(__file__).resolve().parent.parent
MODES = ("nothing", "metrics", "ledger", "tracing")
STREAMS = TOKENS = 64
EVENTS = [StepEvent(StepEventKind.SCHEDULED, 900, 0, 7), StepEvent(StepEventKind.PREFILL, 21_000, 100, 7)]


class ToldEngine(FakeEngineClient):
    """Tells of routes and steps as a pool of replicas does."""

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        if on_route is not None:
            on_route(RouteEvent(RouteKind.ROUTED, 0.0, "m-0", 1))
        first = True
        async for output in super().generate(request):
            if first:
                output.events, first = EVENTS, False
            output.device_us = 450
            yield output


class NoMeter:
    """Every call does nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    pass


def server(mode: str, model: Path, folder: str, collector: str, pipe: Connection) -> None:
    """The child. It is ended by a signal; ``folder`` is the parent's to remove."""
    os.environ["TOQUE_HOME"] = folder
    from toque.config import load_settings
    from toque.formats import load_checkpoint
    from toque.gateway.app import create_app
    from toque.gateway.deployment import FixedDeployment
    from toque.gateway.http import metered
    from toque.gateway.listen import bind
    from toque.gateway.monitoring import set_up
    from toque.gateway.server import GatewayServer
    from toque.text.template import load_template
    from toque.text.tokenizer import load_tokenizer

    checkpoint = load_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.encode(" the quick brown fox jumps over the lazy dog", add_special=False)
    kept = mode in ("ledger", "tracing")
    flags: dict[str, object] = {"server.port": 0, "ledger.enabled": kept, "server.log_level": "warning"}
    flags |= {"tracing.event_log_mb": 64 if kept else 0, "idempotency.enabled": False}
    flags |= {"tracing.endpoint": collector if mode == "tracing" else ""}
    settings = load_settings(flags, environ={})
    card = ModelCard("m", "llama", 1, "Q4_1", 8192, checkpoint.config.vocab_size)
    engine = ToldEngine(Script([words[i % len(words)] for i in range(4096)]))
    deployment = FixedDeployment(
        "m", engine, tokenizer, load_template(checkpoint, tokenizer), card, settings.limits
    )
    app = create_app({"m": deployment}, settings)
    if mode == "nothing":
        metered.Meter = NoMeter  # type: ignore[assignment,misc]  # this is what is measured
    set_up(app.state.gateway, settings).start()
    listener = bind(settings.server, False)
    pipe.send(listener.getsockname()[1])
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(GatewayServer(app, settings.server, 65536).serve([listener]))


class Collector(BaseHTTPRequestHandler):
    """Takes spans, in this process: its time is not the gateway's."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def gateways(model: Path, rounds: int, requests: int) -> dict[str, list[float]]:
    """Seconds of CPU a request, by mode and round."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        children, targets = {}, {}
        for mode in MODES:
            ours, theirs = spawn.Pipe()
            url = f"http://127.0.0.1:{collector.server_port}"
            place = f"{folder}/{mode}"
            child = spawn.Process(target=server, args=(mode, model, place, url, theirs), daemon=True)
            child.start()
            children[mode] = child
            targets[mode] = Target.parse(f"http://127.0.0.1:{ours.recv()}", "m")
        for mode in MODES:
            asyncio.run(many(targets[mode], TOKENS, STREAMS, STREAMS))  # warm up
        for _ in range(rounds):
            for mode in MODES:
                process = psutil.Process(children[mode].pid)
                before = cpu(process)
                asyncio.run(many(targets[mode], TOKENS, requests, STREAMS))
                asyncio.run(asyncio.sleep(1.5))  # what is written and sent afterwards counts, too
                found[mode].append((cpu(process) - before) / requests)
        for child in children.values():
            child.terminate()
            child.join()
    collector.shutdown()
    return found


def served(model: Path, requests: int) -> float:
    """Seconds of CPU that a request takes in all where ``model`` is really served to 64 streams."""
    with tempfile.TemporaryDirectory() as home:
        command = [
            sys.executable,
            "-m",
            "toque",
            "serve",
            f"m={model}",
            "--port",
            "0",
            "--log-level",
            "warning",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TOQUE_HOME": home}
        )
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split(" at ")[1].split("/v1")[0]
            target = Target.parse(url, "m")
            asyncio.run(many(target, TOKENS, STREAMS, STREAMS))
            everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            before = sum(cpu(one) for one in everyone)
            asyncio.run(many(target, TOKENS, requests, STREAMS))
            return (sum(cpu(one) for one in everyone) - before) / requests
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=Path, default=model)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--served", type=int, default=128, help="requests of the real server; 0: none")
    options = parser.parse_args()
    found = gateways(options.model, options.rounds, options.requests)
    whole = served(options.model, options.served) if options.served else 0.0
    print(f"a request of {TOKENS} streamed tokens, {STREAMS} at once; medians of {options.rounds} rounds")
    for mode in MODES:
        more = [one - none for one, none in zip(found[mode], found["nothing"], strict=True)]
        part = f"  {100 * statistics.median(more) / whole:5.2f} % of {whole * 1e3:.0f} ms" if whole else ""
        print(
            f"  {mode:<8} {statistics.median(found[mode]) * 1e3:6.2f} ms of the gateway's CPU, "
            f"{statistics.median(more) * 1e3:+6.2f} ms{part}"
        )


if __name__ == "__main__":
    main()
