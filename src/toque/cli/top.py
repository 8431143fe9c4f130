"""`toque top`: a server's throughput, latency and cost, live in the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Group

LATENCIES = (("ttft", "TTFT"), ("inter_token", "ITL"), ("e2e", "E2E"))
COLUMNS = ("model", "state", "run", "wait", "KV", "tok/s", *(title for _, title in LATENCIES), "cost/Mtok")


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--api-key", default="", help="A key, where the server needs one. [TOQUE_API_KEY]")
@click.option("--window", type=click.Choice(["1m", "5m", "60m"]), default="1m", show_default=True,
              help="What the percentiles are taken over.")  # fmt: skip
@click.option("--interval", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one snapshot as JSON and end.")
@click.option("--once", is_flag=True, help="Print one snapshot and end.")
def command(url: str, api_key: str, window: str, interval: float, as_json: bool, once: bool) -> None:
    """Watch a running server. Latencies are p50 / p95 / p99. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    key = api_key or os.environ.get("TOQUE_API_KEY", "")
    first = snapshot(url, key)
    if as_json:
        click.echo(json.dumps(first, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # nobody's window bounds it
    if once:
        console.print(view(first, window))
        return
    try:
        with Live(view(first, window), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(view(snapshot(url, key), window), refresh=True)
    except KeyboardInterrupt:
        return


def snapshot(url: str, key: str) -> dict[str, Any]:
    """What ``/admin/v1/stats`` of a server says. UnavailableError when it does not."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from toque.errors import RequestError, UnavailableError

    if not url.startswith(("http://", "https://")):
        raise RequestError(f"the server's URL begins with http:// or https://, got {url[:60]!r}", param="url")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(url.rstrip("/") + "/admin/v1/stats", headers=headers), timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        with error:
            said = error.read(300).decode("utf-8", "replace")
        raise UnavailableError(f"{url} answers {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no server answers at {url}: {error}") from None


def view(stats: Mapping[str, Any], window: str) -> Group:
    """What one snapshot of ``/admin/v1/stats`` looks like."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    for name, model in stats["models"].items():
        cost = model.get("since_start")
        table.add_row(
            name,
            *_engine(model),
            *(_percentiles(model["latency"], measure, window) for measure, _ in LATENCIES),
            f"{cost['cost_per_million_tokens']:.4f} {cost['currency']}" if cost else "-",
        )
        replicas = model.get("replicas", {})
        for replica, its in replicas.items() if len(replicas) > 1 or model["state"] != "ready" else ():
            memory = its["engine"].get("memory_bytes", 0)
            size = f"{memory / 2**30:.1f} GiB" if memory else ""
            table.add_row(Text(f"  {replica}", style="dim"), *_engine(its), its["reason"][:40], "", "", size)
    return Group(table, Text(""), _ledger(stats["ledger"]))


def _engine(shown: Mapping[str, Any]) -> tuple[Any, ...]:
    """State, running, waiting, KV and rate: of a model, or of one of its replicas."""
    from rich.text import Text

    engine = shown["engine"]
    total = engine["kv_blocks_total"]
    return (
        Text(shown["state"], style="green" if shown["state"] == "ready" else "red"),
        str(engine["running"]),
        str(engine["waiting"]),
        f"{100 * engine['kv_blocks_used'] / total:.0f}%" if total else "-",
        f"{engine['tokens_per_second']:.0f}",
    )


def _percentiles(latency: Mapping[str, Any], measure: str, window: str) -> str:
    found = latency.get(measure, {}).get(window)
    if not found or not found["count"]:
        return "-"
    return " / ".join(duration(found[name]) for name in ("p50", "p95", "p99"))


def duration(seconds: float) -> str:
    """Three digits at most, in the unit that fits: "7.4ms", "212ms", "3.1s", "95s"."""
    value, unit = (seconds * 1e3, "ms") if seconds < 0.9995 else (seconds, "s")
    return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"


def _ledger(ledger: Mapping[str, Any] | None) -> Any:
    from rich.text import Text

    if ledger is None:
        return Text("ledger: off", style="dim")
    text = f"ledger: {ledger['state']}, {ledger['written']} rows, {ledger['open']} open"
    if ledger["lost"] or ledger["rejected"]:
        text += f", {ledger['lost'] + ledger['rejected']} lost"
    if ledger["reason"]:
        text += f" ({ledger['reason']})"
    return Text(text, style="dim" if ledger["state"] == "ok" else "bold red")
