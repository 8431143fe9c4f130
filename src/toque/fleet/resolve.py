"""From how people name a model to what a replica is started from."""

from __future__ import annotations

import asyncio
from pathlib import Path

from toque.fleet.store import Revision


async def resolve(reference: str) -> Revision:
    """Pins ``reference`` (a path, or a name that the registry knows) to what it means now, and brings its files here.

    Raises what `registry.versions.resolve_version` does: ModelNotFoundError, RequestError, StoreError, DownloadError.
    """
    return await asyncio.to_thread(_resolve, reference)


def _resolve(reference: str) -> Revision:
    path = Path(reference.removeprefix("file:")).expanduser()
    if path.exists():
        return Revision("", reference, str(path.absolute()), label=path.name.removesuffix(".gguf"))
    from toque.registry.versions import resolve_version

    version = resolve_version(reference)
    return Revision("", reference, str(version.path), version.digest, version.reference)
