"""`toque rm`: remove models from the local store, and versions from the registry."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(models: tuple[str, ...], as_json: bool) -> None:
    """Remove MODELS. Files that another model shares stay.

    A pulled model goes at once. A version of a registered model (support-bot/7) is archived, for every machine:
    nothing resolves to it any more, its lineage stays, and `toque gc` frees its files. One that an alias points to
    is refused.
    """
    from toque.registry.names import AliasRef, VersionRef, parse_reference
    from toque.registry.registry import Registry
    from toque.registry.store import Store

    store = Store()
    answers = []
    for model in models:
        if isinstance(parse_reference(model), VersionRef | AliasRef):
            with Registry(store) as registry:
                version = registry.remove(model)
            answers.append({"removed": version.reference, "archived": True, "freed": 0})
            words = f"archived {version.reference}: toque gc frees its files"
        else:
            freed = store.remove(model)
            answers.append({"removed": model, "archived": False, "freed": freed})
            words = f"removed {model}: {freed / 1e6:.0f} MB freed"
        if not as_json:
            click.echo(words)
    if as_json:
        click.echo(json.dumps(answers, indent=2))
