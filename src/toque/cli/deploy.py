"""`toque deploy`: make a deployment of a running server, or change it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from toque.cli.admin_api import (
    AdminApi,
    brief,
    engine_option,
    engine_values,
    path_of,
    server_options,
    settled,
    wait_options,
    wait_until,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@click.command()
@click.argument("model", required=False)
@click.option("--name", default="", help="What clients call it.  [default: from MODEL]")
@click.option(
    "--file", type=click.Path(dir_okay=False, path_type=Path), help="Deployments from a toque.yaml."
)
@click.option("--min", "min_replicas", type=click.IntRange(0), help="Fewest replicas; 0: it may sleep.")
@click.option("--max", "max_replicas", type=click.IntRange(1), help="Most replicas.")
@click.option(
    "--idle", type=click.FloatRange(0), help="With --min 0: seconds without a request until it sleeps."
)
@click.option(
    "--strategy", type=click.Choice(["auto", "surge", "canary", "swap"]), help="How versions roll out."
)
@engine_option
@wait_options
@server_options
def command(
    model: str | None,
    name: str,
    file: Path | None,
    wait: bool,
    timeout: float,
    url: str,
    key: str,
    as_json: bool,
    **changes: Any,
) -> None:
    """Serve MODEL on a running server, or change a deployment: what is not given stays as it is.

    Another model, or other engine options, roll out without a failed request: toque deploy smollm2@production

    With --file, each deployment in it becomes exactly what the file says.
    """
    if (model is None) == (file is None):
        raise click.UsageError("name a model, as in: toque deploy smollm2; or give --file toque.yaml")
    api = AdminApi(url, key)
    specs = _from_file(file) if file is not None else [_changed(api, model or "", name, changes)]
    views = [api.post("deployments", spec) for spec in specs]
    if wait:
        views = [_wait(api, view["name"], timeout) for view in views]
    if as_json:
        click.echo(json.dumps(views if file is not None else views[0], indent=2))
    else:
        for view in views:
            click.echo(brief(view))
    if wait and any(_failed(view) for view in views):
        raise click.exceptions.Exit(1)


def _from_file(file: Path) -> list[Any]:
    import msgspec

    from toque.config import load_settings

    found = load_settings(file=file).deployments
    if not found:
        raise click.UsageError(f"there are no deployments in {file}")
    return [msgspec.to_builtins(spec) for spec in found]


def _changed(api: AdminApi, model: str, name: str, changes: dict[str, Any]) -> Any:
    model = absolute(model)
    name = name or name_of(model)
    view = api.find(path_of("deployments", name))
    spec: dict[str, Any] = {"name": name} if view is None else view["spec"]
    spec["model"] = model
    scaling = spec.setdefault("scaling", {})
    for field, value in (
        ("min_replicas", changes["min_replicas"]),
        ("max_replicas", changes["max_replicas"]),
        ("downscale_to_zero_delay_s", changes["idle"]),
    ):
        if value is not None:
            scaling[field] = value
    if changes["min_replicas"] is not None and changes["max_replicas"] is None:
        scaling["max_replicas"] = max(scaling.get("max_replicas", 1), changes["min_replicas"])
    if changes["strategy"] is not None:
        spec.setdefault("rollout", {})["strategy"] = changes["strategy"]
    options = {**spec.get("engine", {}), **engine_values(changes["engine"])}
    spec["engine"] = {option: value for option, value in options.items() if value is not None}
    return spec


def _wait(api: AdminApi, name: str, timeout_s: float) -> Any:
    return wait_until(lambda: api.get(path_of("deployments", name)), settled, brief, timeout_s)


def _failed(view: Any) -> bool:
    returned = view["rollout"] is not None and view["rollout"]["phase"] == "returned"
    return bool(view["status"] == "failed" or returned)


def absolute(model: str) -> str:
    """A file here by its whole path: the server may run in another folder."""
    path = Path(model.removeprefix("file:")).expanduser()
    return str(path.absolute()) if path.exists() else model


def name_of(model: str) -> str:
    """What clients would call it: the last part of where it is from, without version or file type."""
    last = re.split(r"[/\\#:]", model.rstrip("/"))[-1] if "/" in model or ":" in model else model
    name = last.removesuffix(".gguf").partition("@")[0]
    if re.fullmatch(r"\d+", name) and "/" in model:  # name/7
        name = model.split("/")[-2].split(":")[-1]
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"give --name: {model[:80]!r} does not say what clients shall call it")
    return name
