"""`toque rollout`: from one model version to another while requests come."""

from __future__ import annotations

from typing import Any

import click

from toque.cli.admin_api import (
    AdminApi,
    brief,
    brief_rollout,
    path_of,
    server_options,
    show,
    wait_options,
    wait_until,
)
from toque.cli.deploy import absolute
from toque.cli.proposals import proposal_line

_ENDS = ("done", "returned")


@click.group()
def command() -> None:
    """Roll a new version out: start, status, pause, resume, promote, undo."""


@command.command()
@click.argument("name")
@click.argument("model", default="")
@click.option(
    "--strategy", type=click.Choice(["auto", "surge", "canary", "swap"]), help="[default: the deployment's]"
)
@click.option("--steps", default="", metavar="SHARES", help="Of a canary, such as 0.05,0.25,0.5.")
@click.option("--step-s", type=click.FloatRange(0), help="Of a canary: seconds at each step, at least.")
@click.option("--min-requests", type=click.IntRange(1), help="Of a canary: requests before a step is judged.")
@wait_options
@server_options
def start(
    name: str,
    model: str,
    steps: str,
    wait: bool,
    timeout: float,
    url: str,
    key: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Roll NAME out to MODEL, or to what its own reference means now (its alias may have moved)."""
    api = AdminApi(url, key)
    changes = {field: value for field, value in given.items() if value is not None}
    if steps:
        changes["steps"] = _shares(steps)
    policy = None
    if changes:  # the rest is as the deployment says
        policy = api.get(path_of("deployments", name))["spec"]["rollout"] | changes
    view = api.post(path_of("rollouts", name), {"model": absolute(model) if model else "", "policy": policy})
    finish(api, view, wait, timeout, as_json)


@command.command()
@click.argument("name")
@wait_options
@server_options
def status(name: str, wait: bool, timeout: float, url: str, key: str, as_json: bool) -> None:
    """Show the rollout of NAME: the one that runs, or the last; and the one that is proposed."""
    api = AdminApi(url, key)
    deployment = api.get(path_of("deployments", name))
    if proposed := proposal_line(deployment):
        click.echo(f"proposed: {proposed}", err=as_json)
    path = path_of("rollouts", name)
    view = api.find(path) if proposed else api.get(path)
    if view is None:
        show(deployment["proposed"], as_json, brief(deployment))
    else:
        finish(api, view, wait, timeout, as_json)


def _verb(verb: str, text: str) -> None:
    @command.command(name=verb, help=text)
    @click.argument("name")
    @wait_options
    @server_options
    def step(name: str, wait: bool, timeout: float, url: str, key: str, as_json: bool) -> None:
        api = AdminApi(url, key)
        view = api.post(path_of("rollouts", name, verb))
        back = view["phase"] in ("returning", "restoring", "returned")
        finish(api, view, wait, timeout, as_json, wanted="returned" if verb == "undo" and back else "done")


_verb("pause", "Stay at the present step.")
_verb("resume", "Go on after a pause.")
_verb("promote", "Go on to the new version at once, whatever is left to be judged.")
_verb("undo", "Go back to the version before; also after the rollout has ended.")


def finish(
    api: AdminApi, view: Any, wait: bool, timeout_s: float, as_json: bool, wanted: str = "done"
) -> None:
    """Prints a rollout, at its end with ``wait``: then the exit code says whether that is the ``wanted`` one."""
    name = view["deployment"]
    if wait:
        path = path_of("rollouts", name)
        view = wait_until(
            lambda: api.get(path), lambda seen: seen["phase"] in _ENDS, brief_rollout, timeout_s
        )
    show(view, as_json, brief_rollout(view))
    if wait and view["phase"] != wanted:
        raise click.exceptions.Exit(1)


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--steps takes shares, such as 0.05,0.25,0.5, got {text[:60]!r}") from None
