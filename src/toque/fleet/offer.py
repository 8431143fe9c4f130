"""Tells the fleet of a database that an alias has moved, from a program that is no server."""

from __future__ import annotations

import asyncio

from toque.fleet.admin import FleetAdmin
from toque.fleet.store import Revision


def offer(url: str, model: str, alias: str, version: str = "", digest: str = "", by: str = "") -> list[str]:
    """The names of the deployments of the fleet at ``url`` that are offered a rollout, as `FleetAdmin.propose` does.
    UnavailableError while the database is away."""
    return asyncio.run(_offer(url, model, alias, version, digest, by))


async def _offer(url: str, model: str, alias: str, version: str, digest: str, by: str) -> list[str]:
    from toque.fleet.sql_store import SqlFleetStore

    store = await asyncio.to_thread(SqlFleetStore, url)
    try:
        return await FleetAdmin(store, _unasked, lambda: None).propose(model, alias, version, digest, by)
    finally:
        await store.close()


async def _unasked(reference: str) -> Revision:
    raise AssertionError(f"a proposal resolves nothing, and was asked for {reference}")
