"""`toque bench`: throughput and latency of a server, ours or anybody's that speaks the OpenAI API."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from toque.cli.bench_compare import command as compare_command
from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.bench.client import Record, Target

_STANDARD = (
    "sequential",
    "concurrent",
    "shared-prefix",
)  # as in bench/plan.py, which `--help` need not import
_PROFILES = ("synchronous", "concurrent", "constant", "poisson", "sweep")


class _Bench(click.Group):
    """`toque bench MODEL` is `toque bench run MODEL`, so that the common case needs no second verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


@click.group(cls=_Bench)
def command() -> None:
    """Measure servers and compare measurements."""


command.add_command(compare_command)


@command.command("run")
@click.argument("model", default="smollm2")
@click.option(
    "--url", default="", help="Server to measure; without it, one is started for MODEL on a free port."
)
@click.option("--key", default="", envvar="TOQUE_API_KEY", help="API key of the server.")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option(
    "--workload",
    "loads",
    multiple=True,
    type=click.Choice(_STANDARD),
    help="A standard load; several may be given. All three where neither this nor --profile is.",
)
@click.option(
    "--profile", "profiles", multiple=True, type=click.Choice(_PROFILES), help="Several may be given."
)
@click.option("--concurrency", default="", help="Streams of concurrent and sweep, like 8 or 1,8,64.")
@click.option(
    "--rate",
    "rates",
    default="",
    help="Requests a second of constant and poisson; several make several loads.",
)
@click.option("--levels", type=click.IntRange(1, 100), default=None, help="Rates of a sweep.  [default: 5]")
@click.option(
    "--dataset",
    default="random",
    show_default=True,
    help="random, shared-prefix, multi-turn, or a JSONL file.",
)
@click.option(
    "--input-tokens",
    "inputs",
    default="99",
    show_default=True,
    help="Of a prompt: 128, 64-256, normal:128,32 or lognormal:128,64.",
)
@click.option("--output-tokens", "outputs", default="64", show_default=True, help="Of an answer; as above.")
@click.option(
    "--prefix-tokens",
    type=click.IntRange(0, 1_000_000),
    default=None,
    help="Shared by all prompts, before --input-tokens.  [default: 1000 with shared-prefix]",
)
@click.option(
    "--turns", default="", help="Of a conversation, as --input-tokens.  [default: 4 with multi-turn]"
)
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    default=None,
    help="Conversations in a load.  [default: 100, or what --duration has room for]",
)
@click.option(
    "--duration",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=None,
    help="Seconds after which no conversation begins; all are awaited.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0, 10_000),
    default=1,
    show_default=True,
    help="Conversations before each run that are not counted.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of texts, lengths and arrivals.")
@click.option("--slo", "slo_text", default="", help="For goodput: ttft=500ms,itl=50ms,e2e=4s, also tpot.")
@click.option("--timeout", type=click.FloatRange(0, 1e6, min_open=True), default=600.0, show_default=True)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of full length (a field that OpenAI itself refuses).",
)
@click.option("--usage/--no-usage", default=True, show_default=True, help="Ask for usage in the stream.")
@click.option("--body", default="", help="JSON object merged into every request.")
@click.option(
    "--json", "json_path", default="", help="Write the report with all samples; - for standard output."
)
@click.option("--csv", "csv_path", default="", help="Write a line per request.")
@click.option("--html", "html_path", default="", help="Write a page with charts.")
def run_command(
    model: str, url: str, key: str, endpoint: str, warm_up: int, repeats: int, slo_text: str, timeout: float,
    ignore_eos: bool, usage: bool, body: str, json_path: str, csv_path: str, html_path: str,
    concurrency: str, rates: str, **given: Any,
) -> None:  # fmt: skip
    """Measure MODEL on a server: tokens per second, TTFT, TPOT, inter-token latency, end to end.

    Two measurements are compared by `toque bench compare A.json B.json`.
    """
    from toque.bench.benchmark import benchmark
    from toque.bench.client import Target
    from toque.bench.plan import Plan
    from toque.bench.slo import Slo

    streams = _numbers("--concurrency", concurrency, int, 10_000)
    plan = Plan(concurrency=streams, rates=_numbers("--rate", rates, float, 1e6), **given)
    plan.validate(chat=endpoint == "chat")  # before a server is started
    slo = Slo.parse(slo_text) if slo_text else None
    options = {"endpoint": endpoint, "ignore_eos": ignore_eos, "ask_usage": usage, "extra": _object(body)}
    measured = (
        contextlib.nullcontext(Target.parse(url, model, key, **options)) if url else _server(model, options)
    )
    with measured as target:
        report = benchmark(
            target, plan, slo=slo, repeats=repeats, warm_up=warm_up, timeout_s=timeout, progress=_progress()
        )
    _write(report, json_path, csv_path, html_path)
    if any(result["summary"]["failed"] for result in report["results"]):
        sys.exit(1)


_Number = TypeVar("_Number", int, float)


def _numbers(flag: str, text: str, kind: type[_Number], most: float) -> tuple[_Number, ...]:
    """Numbers above 0, separated by commas. Raises ConfigError, which names the flag."""
    try:
        numbers = tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (kind(0),)
    if not all(0 < number <= most for number in numbers):
        raise ConfigError(
            f"{flag} must be numbers above 0 and up to {most:g}, separated by commas, got {text[:40]!r}",
            param=flag.removeprefix("--"),
        )
    return numbers


def _object(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body) if body else {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"--body is no JSON: {error}", param="body") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--body must be a JSON object, got {body[:40]!r}", param="body")
    return found


def _progress() -> Callable[[str, Record], None] | None:
    """Shows how far a run is, where a person watches."""
    if not sys.stderr.isatty():
        return None
    counts: dict[str, int] = {}

    def told(load: str, record: Record) -> None:
        counts[load] = counts.get(load, 0) + 1
        click.echo(f"\r{load}: {counts[load]} requests \x1b[K", nl=False, err=True)

    return told


def _write(report: dict[str, Any], json_path: str, csv_path: str, html_path: str) -> None:
    from toque.bench.document import as_csv
    from toque.bench.html import page

    text = json.dumps(report, separators=(",", ":"))
    for path, make in ((csv_path, as_csv), (html_path, page)):
        if path:
            Path(path).write_text(make(report), encoding="utf-8")
    if json_path and json_path != "-":
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    if json_path == "-":
        click.echo(text)
    else:
        _print(report["results"])


def _print(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from toque.bench.html import figures

    console = Console()
    for first in range(0, len(results), 3):  # a column for each load: three of them fit in 80 characters
        columns = results[first : first + 3]
        table = Table()
        table.add_column("")
        for result in columns:
            table.add_column(result["name"], justify="right")
        for heading, cells in figures(columns):
            table.add_row(heading, *cells)
        console.print(table)
    for result in results:
        summary = result["summary"]
        for message in summary["messages"]:
            click.echo(f"{result['name']}: {message}", err=True)
        if summary["tokens_from"] != "usage":
            click.echo(
                f"{result['name']}: no usage from the server; tokens are the events with text", err=True
            )


@contextlib.contextmanager
def _server(model: str, options: dict[str, Any]) -> Iterator[Target]:
    from toque.bench.client import Target
    from toque.bench.local_server import toque_server

    with toque_server(model) as server:
        yield Target.parse(server.url, server.served, server.key, **options)
