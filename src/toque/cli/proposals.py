"""What follows for deployments when an alias moves, as the verbs that move one say it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toque.registry.registry import Registry
    from toque.registry.version import ModelVersion


def propose(registry: Registry, model: str, alias: str, version: ModelVersion | None) -> list[str]:
    """The deployments of the registry's fleet that are offered a rollout to ``version``; None: the alias is gone.

    The alias has moved by now: a fleet that cannot be told is said, and is no failure.
    """
    from toque.errors import ToqueError
    from toque.fleet.offer import offer
    from toque.registry.registry import somebody

    label, digest = ("", "") if version is None else (version.reference, version.digest)
    try:
        url = registry.store.registry.database_url(registry.store.home)
        return offer(url, model, alias, label, digest, somebody())
    except ToqueError as error:
        click.echo(f"note: no deployment could be told: {error.message}", err=True)
        return []


def proposal_line(view: Any) -> str:
    """What a deployment's view proposes; "" if nothing."""
    proposed = view.get("proposed")
    if not proposed:
        return ""
    return f"{proposed['reference']} is {proposed['version']} now: toque rollout start {view['name']}"
