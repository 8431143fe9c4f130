"""Freeing what nothing refers to: blobs of this machine, blobs of the shared store, broken registrations.

A file is needed by the manifests of this machine (its own blobs only), by versions that are PENDING or READY, and by
whatever runs; and for a grace it is left alone whoever needs it, because an upload under way is not in any table yet
where its registration has only begun.

Why no registration can lose a file to a sweep: its row with the files' digests is committed before the first of them
is put, and a sweep reads the rows and deletes in one transaction that keeps new rows out. Either the sweep sees the
row and keeps the files, or the row comes after the sweep, and what it deleted is put again.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toque.registry.blobs import DELETED_AT_ONCE
from toque.registry.database import files_in_use, microseconds
from toque.registry.locks import locked
from toque.registry.record import load
from toque.registry.registry import Registry
from toque.registry.store import Store

log = logging.getLogger("toque.registry")

GRACE_S = 24 * 3600.0


@dataclass(slots=True)
class Swept:
    """What a sweep freed, or would have: numbers of files, and bytes."""

    local_files: int = 0
    local_bytes: int = 0
    shared_files: int = 0
    shared_bytes: int = 0
    folders: int = 0  # of downloads that nobody continued
    failed: list[str] = field(default_factory=list)  # versions whose registration broke off


def collect(
    store: Store, *, in_use: Iterable[str] = (), grace_s: float = GRACE_S, dry_run: bool = False
) -> Swept:
    """Sweep this machine's store, and the registry's shared blobs if there are any.

    ``in_use`` are the model digests of what runs. Raises StoreError when the registry's database cannot be asked:
    then nothing is freed.
    """
    swept, before, digests = Swept(), time.time() - grace_s, sorted(set(in_use))
    if not store.registry.exists(store.home):
        with locked(store.change_lock):
            _sweep_local(store, _needed_here(store, digests), before, dry_run, swept)
    else:
        with Registry(store) as registry:
            if not dry_run:
                swept.failed = registry.database.expire_pending(microseconds() - int(grace_s * 1e6))
            with locked(store.change_lock), registry.database.without_new_rows() as connection:
                needed = files_in_use(connection, digests) | _needed_here(store, digests)
                _sweep_local(store, needed, before, dry_run, swept)
            _sweep_shared(registry, digests, before, dry_run, swept)
    if not dry_run:
        swept.folders = _sweep_partial(store, before)
    return swept


def _needed_here(store: Store, digests: Iterable[str]) -> set[str]:
    """What the manifests of this machine need, and the links of what runs.

    A manifest that cannot be read, perhaps of a newer Toque, is a StoreError: who knows what it needs.
    """
    manifests = sorted((store.home / "manifests").glob("*.json"))
    needed = {file.sha256 for path in manifests for file in load(path.read_bytes(), str(path)).files}
    for digest in digests:
        for link in store.links(digest).rglob("*"):
            if link.is_symlink():
                needed.add(os.path.basename(os.readlink(link)).removeprefix("sha256-"))
    return needed


def _sweep_local(store: Store, needed: set[str], before: float, dry_run: bool, swept: Swept) -> None:
    for blob in sorted((store.home / "blobs").glob("sha256-*")):
        status = blob.stat()
        if blob.name.removeprefix("sha256-") in needed or status.st_mtime > before:
            continue
        swept.local_files += 1
        swept.local_bytes += status.st_size
        if not dry_run:
            blob.unlink()
    if dry_run:
        return
    for folder in (store.home / "models").glob("*"):
        links = [path for path in folder.rglob("*") if path.is_symlink()]
        if not any(link.exists() for link in links) and _touched(folder) <= before:
            shutil.rmtree(folder, ignore_errors=True)  # links to nothing


def _sweep_shared(registry: Registry, digests: list[str], before: float, dry_run: bool, swept: Swept) -> None:
    blobs = registry.blobs
    if blobs is None:
        return
    old = {sha256: size for sha256, size, modified in blobs.every() if modified <= before}
    candidates = sorted(old)
    for start in range(0, len(candidates), DELETED_AT_ONCE):
        with registry.database.without_new_rows() as connection:
            needed = files_in_use(connection, digests)
            unneeded = [sha for sha in candidates[start : start + DELETED_AT_ONCE] if sha not in needed]
            if unneeded and not dry_run:
                blobs.delete(unneeded)
        swept.shared_files += len(unneeded)
        swept.shared_bytes += sum(old[sha256] for sha256 in unneeded)


def _sweep_partial(store: Store, before: float) -> int:
    """Working folders that nobody has touched since; whoever works in one holds its lock."""
    swept = 0
    for work in sorted((store.home / "partial").glob("*")):
        if _touched(work) > before:
            continue
        with locked(store.home / "locks" / f"{work.name}.lock"):
            if _touched(work) <= before:
                shutil.rmtree(work, ignore_errors=True)
                swept += 1
    return swept


def _touched(folder: Path) -> float:
    """When anything in a folder was last written."""
    newest = 0.0
    with suppress(FileNotFoundError):  # it goes while we look
        for path in (folder, *folder.rglob("*")):
            newest = max(newest, path.lstat().st_mtime)
    return newest
