"""From how people name a model to what a replica is started from."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
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
        return Revision("", reference, str(path.absolute()), label=file_label(path))
    from toque.registry.store import Store
    from toque.registry.versions import resolve_version

    version = resolve_version(reference, store=Store(registry=registry))
    return Revision("", reference, str(version.path), version.digest, version.reference)


def file_label(path: Path) -> str:
    """What clients are told of a version that is a plain file or a folder: its name, and eight hex digits that change
    when the file does. ASCII, for it is a header's value; without the folder, which is nobody's business.

    The digits come from names, sizes and times of change, not from content: a model is not read to be named.
    """
    found = hashlib.sha256()
    with suppress(OSError):  # what cannot be read is refused when it is loaded
        for name, size, changed in sorted(_files(path)):
            found.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().name.removesuffix(".gguf")).strip("-")
    return f"{name[:64] or 'model'}-{found.hexdigest()[:8]}"


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    if not path.is_dir():
        status = path.stat()
        yield path.name, status.st_size, status.st_mtime_ns
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file():
                status = entry.stat()
                yield entry.name, status.st_size, status.st_mtime_ns
