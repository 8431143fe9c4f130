"""`toque list`: the models of the local store and of the registry, or the versions of one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from toque.registry.store import Store
    from toque.registry.version import RegisteredModel


@click.command()
@click.argument("model", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--catalog", "with_catalog", is_flag=True, help="Also those that can be pulled by name.")
@click.option("--all", "every", is_flag=True, help="Of MODEL: also versions that failed or are archived.")
def command(model: str, as_json: bool, with_catalog: bool, every: bool) -> None:
    """List the models in the local store and the registered ones, or the versions of MODEL."""
    from toque.registry.catalog import builtin
    from toque.registry.store import Store

    store = Store()
    if model:
        _versions(store, model, every, as_json)
        return
    records = store.list()
    here = {record.name for record in records}
    more = [entry for entry in builtin().values() if with_catalog and entry.name not in here]
    registered = _registered(store)
    if as_json:
        models = [{**record.to_dict(), "pulled": True} for record in records]
        models += [{**asdict(found), "registered": True, "pulled": False} for found in registered]
        models += [
            {"name": e.name, "description": e.description, "license": e.license, "pulled": False}
            for e in more
        ]
        click.echo(json.dumps(models, indent=2))
        return
    if not records and not more and not registered:
        click.echo("the store is empty; start with: toque pull smollm2")
        return
    rows = [
        [
            record.name,
            f"{record.size / 1e6:.0f} MB",
            record.quantization or "-",
            record.architecture or "-",
            record.license or "-",
        ]
        for record in records
    ]
    rows += [[entry.name, "-", "-", "-", f"{entry.license}  (not pulled)"] for entry in more]
    if rows:
        click.echo(_table(["NAME", "SIZE", "TYPE", "ARCHITECTURE", "LICENSE"], rows))
    if registered:
        click.echo("\nregistered:" if rows else "registered:")
        aliases = [", ".join(f"{name} → {n}" for name, n in found.aliases.items()) for found in registered]
        rows = [
            [found.name, str(found.versions), str(found.newest or "-"), shown or "-"]
            for found, shown in zip(registered, aliases, strict=True)
        ]
        click.echo(_table(["MODEL", "VERSIONS", "NEWEST", "ALIASES"], rows))


def _registered(store: Store) -> list[RegisteredModel]:
    if not store.registry.exists(store.home):
        return []
    from toque.registry.registry import Registry

    with Registry(store) as registry:
        return registry.database.models()


def _versions(store: Store, model: str, every: bool, as_json: bool) -> None:
    from toque.errors import ModelNotFoundError
    from toque.registry.names import check_name
    from toque.registry.registry import Registry

    check_name(model)
    found = []
    if store.registry.exists(store.home):
        with Registry(store) as registry:
            found = registry.database.versions(model, every=every)
    if not found:
        raise ModelNotFoundError(f"the registry has no version of {model!a}", param="model")
    if as_json:
        click.echo(json.dumps([version.to_dict() for version in found], indent=2))
        return
    rows = [
        [
            version.reference,
            version.status.value,
            f"{version.size / 1e6:.0f} MB",
            version.quantization or "-",
            version.digest[:12],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(version.created_at / 1e6)),
            version.created_by or "-",
            ", ".join(version.aliases) or "-",
        ]
        for version in found
    ]
    click.echo(_table(["VERSION", "STATUS", "SIZE", "TYPE", "DIGEST", "CREATED", "BY", "ALIASES"], rows))


def _table(head: list[str], rows: list[list[str]]) -> str:
    from toque.cli.admin_api import table

    return table(tuple(head), rows)
