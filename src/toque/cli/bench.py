"""`toque bench`: throughput and latency of a server, ours or anybody's that speaks the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.bench.report import Report


@click.command()
@click.argument("model", default="smollm2")
@click.option(
    "--url", default="", help="Server to measure; without it, one is started for MODEL on a free port."
)
@click.option("--key", default="", envvar="TOQUE_API_KEY", help="API key of the server.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice(["sequential", "concurrent", "shared-prefix"]),
    help="May be given several times; all three by default.",
)
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=None, help="Requests per workload.")
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=None, help="Requests in flight.")
@click.option("--output-tokens", type=click.IntRange(1, 100_000), default=64, show_default=True)
@click.option(
    "--json", "json_path", default="", help="Write the full report to this file; - for standard output."
)
def command(
    model: str,
    url: str,
    key: str,
    names: tuple[str, ...],
    requests: int | None,
    concurrency: int | None,
    output_tokens: int,
    json_path: str,
) -> None:
    """Measure MODEL on a server: tokens per second, time to first token, inter-token latency, end to end."""
    from toque.bench.client import Target
    from toque.bench.run import run
    from toque.bench.workload import WORKLOADS

    with _server(model) if not url else contextlib.nullcontext(url) as address:
        target = Target.parse(address, model, key)
        reports = []
        for name in names or tuple(WORKLOADS):
            options: dict[str, Any] = {"output_tokens": output_tokens}
            if requests is not None:
                options["requests"] = requests
            if concurrency is not None and name != "sequential":
                options["concurrency"] = concurrency
            reports.append(asyncio.run(run(target, WORKLOADS[name](**options))))
    text = json.dumps(
        {"model": model, "url": url or "local", "reports": [r.as_dict() for r in reports]}, indent=2
    )
    if json_path == "-":
        click.echo(text)
    else:
        if json_path:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
        _print(reports)
    if any(r.failed for r in reports):
        sys.exit(1)


def _print(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="latencies in milliseconds")
    for heading in (
        "workload",
        "requests",
        "failed",
        "req/s",
        "out tok/s",
        "TTFT p50/p95/p99",
        "ITL p50/p95/p99",
        "E2E p50/p95/p99",
    ):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for r in reports:
        latencies = [
            f"{p.p50 * 1e3:.1f}/{p.p95 * 1e3:.1f}/{p.p99 * 1e3:.1f}"
            for p in (r.ttft, r.inter_token, r.end_to_end)
        ]
        table.add_row(
            r.workload,
            str(r.requests),
            str(r.failed),
            f"{r.requests_per_second:.2f}",
            f"{r.output_tokens_per_second:.0f}",
            *latencies,
        )
    console = Console()
    console.print(table)
    for r in reports:
        for error in r.errors:
            console.print(f"[red]{r.workload}: {error}[/red]")


@contextlib.contextmanager
def _server(model: str) -> Iterator[str]:
    """A `toque serve` of its own on a free loopback port, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "toque", "serve", model, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None:
                raise ConfigError(
                    f"the server for {model!r} ended with exit code {process.returncode} before it was ready"
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/ready", timeout=1).close()
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"the server for {model!r} was not ready after 120 s")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
