"""`toque show`: one model of the local store."""

from __future__ import annotations

import json
import time

import click


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, as_json: bool) -> None:
    """Show one model: its files with their digests, where it came from, what it is."""
    from toque.registry.store import Store

    store = Store()
    record = store.show(model)
    path = store.path(model)
    if as_json:
        click.echo(json.dumps({**record.to_dict(), "path": str(path)}, indent=2))
        return
    pulled = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.pulled_at))
    facts = {
        "name": record.name,
        "description": record.description,
        "source": record.source,
        "revision": record.revision,
        "license": record.license,
        "pulled": pulled,
        "format": record.format,
        "architecture": record.architecture,
        "parameters": f"{record.parameters / 1e6:.0f} million" if record.parameters else "",
        "quantization": record.quantization,
        "context": f"{record.context_length} tokens" if record.context_length else "",
        "problem": record.problem,
        "size": f"{record.size / 1e6:.1f} MB",
        "digest": record.digest,
        "path": str(path),
    }
    for key, value in facts.items():
        if value:
            click.echo(f"{key + ':':<14}{value}")
    click.echo("files:")
    for file in record.files:
        click.echo(f"  {file.sha256}  {file.size:>12}  {file.name}")
