"""`toque list`: the models of the local store."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--catalog", "with_catalog", is_flag=True, help="Also those that can be pulled by name.")
def command(as_json: bool, with_catalog: bool) -> None:
    """List the models in the local store."""
    from toque.registry.catalog import builtin
    from toque.registry.store import Store

    records = Store().list()
    here = {record.name for record in records}
    more = [entry for entry in builtin().values() if with_catalog and entry.name not in here]
    if as_json:
        models = [{**record.to_dict(), "pulled": True} for record in records]
        models += [
            {"name": e.name, "description": e.description, "license": e.license, "pulled": False}
            for e in more
        ]
        click.echo(json.dumps(models, indent=2))
        return
    if not records and not more:
        click.echo("the store is empty; start with: toque pull smollm2")
        return
    width = max(len(name) for name in ["NAME", *here, *(entry.name for entry in more)])
    click.echo(f"{'NAME':<{width}}  {'SIZE':>8}  {'TYPE':<8}  {'ARCHITECTURE':<12}  LICENSE")
    for record in records:
        click.echo(
            f"{record.name:<{width}}  {record.size / 1e6:>5.0f} MB  {record.quantization or '-':<8}  "
            f"{record.architecture or '-':<12}  {record.license or '-'}"
        )
    for entry in more:
        click.echo(f"{entry.name:<{width}}  {'-':>8}  {'-':<8}  {'-':<12}  {entry.license}  (not pulled)")
