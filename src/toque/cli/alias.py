"""`toque alias`: names such as production that point to a version of a registered model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import click


@click.command()
@click.argument("model")
@click.argument("alias", default="")
@click.argument("version", default="")
@click.option("--rm", "remove", is_flag=True, help="Remove the alias.")
@click.option("--expect", type=click.IntRange(1), help="Move it only if it points to this version now.")
@click.option("--history", is_flag=True, help="Show every move.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str, alias: str, version: str, remove: bool, expect: int | None, history: bool, as_json: bool
) -> None:
    """Show the aliases of MODEL, or make ALIAS point to VERSION (a number, or another alias of the model).

    The move is one step: whoever resolves the alias sees the old version or the new one. Deployments of the registry's
    fleet that follow it are offered a rollout: `toque rollout start NAME` begins it, or the fleet itself where the
    deployment says rollout.follow: auto.
    """
    from toque.cli.proposals import propose
    from toque.errors import RequestError
    from toque.registry.names import check_alias, check_name
    from toque.registry.registry import Registry, somebody

    check_name(model)
    if version and remove:
        raise click.UsageError("give either a version or --rm")
    if (version or remove) and not alias:
        raise click.UsageError("name the alias")
    with Registry() as registry:
        database = registry.database
        if history:
            events = database.alias_events(model, alias or None)
            if as_json:
                click.echo(json.dumps([asdict(event) for event in events], indent=2))
                return
            for event in events:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at / 1e6))
                click.echo(
                    f"{when}  {model}@{event.alias}  {_shown(event.previous)} → {_shown(event.version)}  {event.actor}"
                )
            return
        if version:
            check_alias(alias)
            target = registry.find(f"{model}/{version}" if version.isdecimal() else f"{model}@{version}")
            if target.model != model:
                raise RequestError(f"{version} is not a version of {model}", param="version")
            previous = database.move_alias(model, alias, target.version, actor=somebody(), expected=expect)
            answer = {"model": model, "alias": alias, "version": target.version, "previous": previous}
            words = f"{model}@{alias} → {target.reference} (before: {_shown(previous)})"
            proposed = propose(registry, model, alias, target)
        elif remove:
            previous = database.remove_alias(model, alias, actor=somebody())
            answer = {"model": model, "alias": alias, "version": None, "previous": previous}
            words = f"removed {model}@{alias} (it pointed to {model}/{previous})"
            proposed = propose(registry, model, alias, None)
        else:
            found = [entry for entry in database.aliases(model) if alias in ("", entry.alias)]
            if as_json:
                click.echo(json.dumps([asdict(entry) for entry in found], indent=2))
                return
            for entry in found:
                click.echo(f"{model}@{entry.alias} → {model}/{entry.version}")
            if not found:
                click.echo(f"{model} has no alias{f' {alias}' if alias else ''}")
            return
    if as_json:
        click.echo(json.dumps({**answer, "proposed": proposed}))
        return
    click.echo(words)
    for name in proposed:
        click.echo(f"a rollout of {name} is proposed: toque rollout start {name}")


def _shown(version: int | None) -> str:
    return "none" if version is None else str(version)
