"""`toque start`: what `toque stop` stopped."""

from __future__ import annotations

import click

from toque.cli.admin_api import (
    AdminApi,
    brief,
    path_of,
    server_options,
    settled,
    show,
    wait_options,
    wait_until,
)


@click.command()
@click.argument("name")
@wait_options
@server_options
def command(name: str, wait: bool, timeout: float, url: str, key: str, as_json: bool) -> None:
    """Start NAME again."""
    api = AdminApi(url, key)
    view = api.post(path_of("deployments", name, "start"))
    if wait:
        view = wait_until(lambda: api.get(path_of("deployments", name)), settled, brief, timeout)
    show(view, as_json, brief(view))
    if wait and view["status"] == "failed":
        raise click.exceptions.Exit(1)
