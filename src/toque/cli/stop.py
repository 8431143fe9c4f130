"""`toque stop`: end a deployment's replicas."""

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
@click.option("--delete", is_flag=True, help="Remove the deployment too.")
@wait_options
@server_options
def command(name: str, delete: bool, wait: bool, timeout: float, url: str, key: str, as_json: bool) -> None:
    """Stop NAME until it is started or deployed again. What it is answering is finished first, within its grace."""
    api = AdminApi(url, key)
    path = path_of("deployments", name)
    if delete:
        answer = api.delete(path)
        if wait:
            wait_until(lambda: api.find(path), lambda view: view is None, brief, timeout)
        show(answer, as_json, f"{name}: deleted")
        return
    view = api.post(path_of("deployments", name, "stop"))
    if wait:
        view = wait_until(lambda: api.get(path), settled, brief, timeout)
    show(view, as_json, brief(view))
