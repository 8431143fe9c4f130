"""From how people name a model to what a replica is started from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from toque.file_state import file_state
from toque.fleet.store import Revision
from toque.registry.settings import RegistrySettings, from_environment
from toque.registry.signing import check_path, check_signed


def resolver(registry: RegistrySettings) -> Callable[[str], Awaitable[Revision]]:
    """`resolve` with the registry that the settings name, rather than the environment."""

    async def resolved(reference: str) -> Revision:
        return await asyncio.to_thread(_resolve, reference, registry)

    return resolved


async def resolve(reference: str) -> Revision:
    """Pins ``reference`` (a path, or a name that the registry knows) to what it means now, and brings its files here.

    Raises what `registry.versions.resolve_version` does: ModelNotFoundError, RequestError, StoreError, DownloadError;
    and SignatureError for what may not be served as it is.
    """
    return await asyncio.to_thread(_resolve, reference)


def _resolve(reference: str, registry: RegistrySettings | None = None) -> Revision:
    path = Path(reference.removeprefix("file:")).expanduser()
    if path.exists():
        check_path(registry or from_environment(), path)
        state = file_state(path)
        return Revision("", reference, str(path.absolute()), label=file_label(path, state), state=state)
    from toque.registry.store import Store
    from toque.registry.versions import resolve_version

    store = Store(registry=registry)
    version = resolve_version(reference, store=store)
    check_signed(store, version.reference)
    return Revision("", reference, str(version.path), version.digest, version.reference)


def file_label(path: Path, state: str) -> str:
    """What clients are told of a version that is a plain file or a folder: its name, and eight hex digits of its
    `file_state`. ASCII, for it is a header's value; without the folder, which is nobody's business.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().name.removesuffix(".gguf")).strip("-")
    return f"{name[:64] or 'model'}-{state[:8] or 'unknown'}"
