"""`toque ps`: what a server runs: deployments and their replica processes."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from toque.cli.admin_api import AdminApi, path_of, server_options, table
from toque.cli.proposals import proposal_line


@click.command()
@click.argument("name", required=False)
@click.option("-q", "--quiet", is_flag=True, help="Print the replicas' process ids only.")
@server_options
def command(name: str | None, quiet: bool, url: str, key: str, as_json: bool) -> None:
    """List the deployments of a running server and their replicas, or those of NAME."""
    api = AdminApi(url, key)
    if name is None:
        deployments = api.get("deployments")["data"]
    else:
        deployments = [api.get(path_of("deployments", name))]
    replicas = [
        replica for replica in api.get("replicas")["data"] if name is None or replica["deployment"] == name
    ]
    if quiet:
        for replica in replicas:
            if replica["handle"]:
                click.echo(replica["handle"])
        return
    if as_json:
        click.echo(json.dumps({"deployments": deployments, "replicas": replicas}, indent=2))
        return
    click.echo(
        table(("NAME", "VERSION", "STATUS", "REPLICAS", "SCALE", "REASON"), [_row(d) for d in deployments])
    )
    if replicas:
        click.echo("")
        head = ("REPLICA", "VERSION", "STATE", "PROCESS", "MEMORY", "UP", "RESTARTS", "REASON")
        click.echo(table(head, [_replica(replica) for replica in replicas]))


def _row(view: Any) -> list[str]:
    scaling = view["spec"]["scaling"]
    shares = {label: share for label, share in view["shares"].items() if share}
    version = view["version"]
    if len(shares) > 1:
        version = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
    return [
        view["name"],
        version,
        view["status"],
        f"{view['ready']}/{view['target']}",
        f"{scaling['min_replicas']}..{scaling['max_replicas']}",
        "; ".join(part for part in (view["reason"], proposal_line(view)) if part),
    ]


def _replica(view: Any) -> list[str]:
    since = view["ready_at"] or view["started_at"]
    return [
        view["id"],
        view["version"],
        view["state"],
        view["handle"] or "-",
        f"{view['memory_mb']} MB" if view["memory_mb"] else "-",
        _age(time.time() - since) if since else "-",
        str(view["restarts"]),
        view["reason"],
    ]


def _age(seconds: float) -> str:
    """ "42s", "17m", "5h", "3d"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
