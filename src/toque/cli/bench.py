"""`toque bench`: throughput and latency of a server, ours or anybody's that speaks the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.bench.client import Target
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

    given = contextlib.nullcontext(Target.parse(url, model, key)) if url else None
    with given or _server(model) as target:
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

    table = Table()  # a column for each workload: three of them fit in 80 characters
    table.add_column("")
    for r in reports:
        table.add_column(r.workload, justify="right")
    lines: dict[str, list[str]] = {
        "requests": [str(r.requests) for r in reports],
        "failed": [str(r.failed) for r in reports],
        "requests/s": [f"{r.requests_per_second:.2f}" for r in reports],
        "output tokens/s": [f"{r.output_tokens_per_second:.0f}" for r in reports],
    }
    for name, attribute in (("TTFT", "ttft"), ("inter-token", "inter_token"), ("end to end", "end_to_end")):
        for rank in ("p50", "p95", "p99"):
            lines[f"{name} {rank} ms"] = [
                f"{getattr(getattr(r, attribute), rank) * 1e3:.1f}" for r in reports
            ]
    for heading, cells in lines.items():
        table.add_row(heading, *cells)
    Console().print(table)
    for r in reports:
        for error in r.errors:
            click.echo(f"{r.workload}: {error}", err=True)


@contextlib.contextmanager
def _server(model: str) -> Iterator[Target]:
    """A `toque serve` of its own on a free loopback port, stopped at the end. It keeps out of this machine's ledger."""
    from toque.bench.client import Target

    key = secrets.token_hex(16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.TemporaryDirectory(prefix="toque-bench-")
    process = subprocess.Popen(
        [sys.executable, "-m", "toque", "serve", model, "--port", str(port), "--log-level", "warning"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("TOQUE_API_KEY")},
            "TOQUE_AUTH_API_KEYS": key,
            "TOQUE_LEDGER_FOLDER": folder.name,
            "TOQUE_LEDGER_URL": "",
        },
        stdout=subprocess.DEVNULL,  # what it says when it is ready
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None:
                raise ConfigError(
                    f"the server for {model!r} ended with exit code {process.returncode} before it was ready"
                )
            with contextlib.suppress(OSError):  # not there yet, not ready yet, or slow to say so
                urllib.request.urlopen(f"{url}/ready", timeout=1).close()
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"the server for {model!r} was not ready after 120 s")
            time.sleep(0.05)
        asking = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asking, timeout=10) as answer:
            served = json.load(answer)["data"][0]["id"]  # a path is served under the file's name
        yield Target.parse(url, served, key)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        folder.cleanup()
