"""From how people name a model to what a replica is started from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from toque.fleet.store import Revision
from toque.registry.settings import RegistrySettings


def resolver(registry: RegistrySettings) -> Callable[[str], Awaitable[Revision]]:
    """`resolve` with the registry that the settings name, rather than the environment."""

    async def resolved(reference: str) -> Revision:
        return await asyncio.to_thread(_resolve, reference, registry)

    return resolved


async def resolve(reference: str) -> Revision:
    """Pins ``reference`` (a path, or a name that the registry knows) to what it means now, and brings its files here.

    Raises what `registry.versions.resolve_version` does: ModelNotFoundError, RequestError, StoreError, DownloadError.
    """
    return await asyncio.to_thread(_resolve, reference)


def _resolve(reference: str, registry: RegistrySettings | None = None) -> Revision:
    path = Path(reference.removeprefix("file:")).expanduser()
    if path.exists():
        return Revision("", reference, str(path.absolute()), label=path.name.removesuffix(".gguf"))
    from toque.registry.store import Store
    from toque.registry.versions import resolve_version

    version = resolve_version(reference, store=Store(registry=registry))
    return Revision("", reference, str(version.path), version.digest, version.reference)
