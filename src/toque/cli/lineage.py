"""`toque lineage`: what a version was made from, how, and what was made from it."""

from __future__ import annotations

import json
from typing import Any

import click

_DEPTH = 20


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, as_json: bool) -> None:
    """Show where MODEL (a version, an alias, or a name for its newest version) comes from."""
    from toque.registry.lineage import ancestry
    from toque.registry.registry import Registry

    with Registry() as registry:
        tree = ancestry(registry.database, registry.find(model), _DEPTH)
    if as_json:
        click.echo(json.dumps(tree, indent=2))
        return
    _show(tree, 0)
    if tree["children"]:
        click.echo(f"made from it: {', '.join(tree['children'])}")


def _show(node: dict[str, Any], depth: int) -> None:
    pad = "  " * depth
    relation = f"  [{node['relation']}]" if node["relation"] else ""
    click.echo(f"{pad}{node['reference']}  {node['digest'][:12] or '-'}{relation}")
    run = node["run"]
    if run:
        words = [run["system"], run["run_id"], run["run_url"]]
        if run["git_commit"]:
            words.append(f"git {run['git_commit'][:12]}")
        click.echo(f"{pad}  by {' '.join(filter(None, words)) or 'hand'}")
        for title in ("params", "metrics"):
            if run[title]:
                shown = ", ".join(f"{key} {_brief(value)}" for key, value in run[title].items())
                click.echo(f"{pad}  {title}: {shown[:200]}")
    for data in node["datasets"]:
        click.echo(f"{pad}  data: {data['name']} {data['digest'][:19]} ({data['context']})".rstrip())
    for result in node["evaluations"]:
        where = f" on {result['dataset']}" if result["dataset"] else ""
        click.echo(f"{pad}  {result['metric']}: {_brief(result['value'])}{where}")
    for parent in node["parents"]:
        _show(parent, depth + 1)


def _brief(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
