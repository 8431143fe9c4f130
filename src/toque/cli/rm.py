"""`toque rm`: remove models from the local store."""

from __future__ import annotations

import click


@click.command()
@click.argument("models", nargs=-1, required=True)
def command(models: tuple[str, ...]) -> None:
    """Remove MODELS from the local store. Files that another model shares stay."""
    from toque.registry.store import Store

    store = Store()
    for model in models:
        freed = store.remove(model)
        click.echo(f"removed {model}: {freed / 1e6:.0f} MB freed")
