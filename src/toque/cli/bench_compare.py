"""`toque bench compare`: two measurements side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("compare")
@click.argument("a", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("b", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--confidence", type=click.FloatRange(0.5, 0.999), default=0.95, show_default=True)
@click.option("--resamples", type=click.IntRange(100, 100_000), default=1000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(a: Path, b: Path, confidence: float, resamples: int, as_json: bool) -> None:
    """Say by how much B differs from A (two JSON reports), with bootstrap confidence intervals."""
    from toque.bench.compare import as_dicts, compare
    from toque.bench.document import read

    changes = compare(
        read(a.read_bytes(), str(a)), read(b.read_bytes(), str(b)), confidence=confidence, resamples=resamples
    )
    if as_json:
        click.echo(json.dumps(as_dicts(changes), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    for load in dict.fromkeys(change.load for change in changes):
        table = Table(title=f"{load}: B / A")
        for heading in ("", "A", "B", "change", f"{confidence:.0%} interval", ""):
            table.add_column(heading, justify="right" if heading else "left")
        for c in changes:
            if c.load != load:
                continue
            scale = 1 if c.metric.endswith("/s") else 1e3
            metric = c.metric if scale == 1 else f"{c.metric} ms"
            span = "" if c.low is None or c.high is None else f"{c.low - 1:+.1%} … {c.high - 1:+.1%}"
            table.add_row(
                metric, f"{c.a * scale:.2f}", f"{c.b * scale:.2f}", f"{c.ratio - 1:+.1%}", span, c.verdict
            )
        Console().print(table)
    click.echo("unclear: the interval has no change in it. A rate has an interval from three --repeats on.")
