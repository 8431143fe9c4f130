"""`toque restart`: new replica processes, one after another."""

from __future__ import annotations

import click

from toque.cli.admin_api import (
    AdminApi,
    engine_option,
    engine_values,
    path_of,
    server_options,
    wait_options,
)
from toque.cli.rollout import finish


@click.command()
@click.argument("name")
@engine_option
@wait_options
@server_options
def command(
    name: str, engine: tuple[str, ...], wait: bool, timeout: float, url: str, key: str, as_json: bool
) -> None:
    """Replace every replica of NAME, one after another, with no failed request.

    Changed engine options come with it: toque restart chat --engine threads=1 (threads=default takes one back).
    """
    api = AdminApi(url, key)
    view = api.post(path_of("deployments", name, "restart"), {"engine": engine_values(engine)})
    finish(api, view, wait, timeout, as_json)
