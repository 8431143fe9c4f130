"""What a reference means now, and what to load for it: the fleet's and the store's way into the registry.

Two steps, because they happen in two places: `pin_version` where a deployment is decided (an alias becomes a version
that never changes), `resolve_version` where a replica starts (its files are brought to this machine). Both block;
call them in a thread. A version that was resolved has a manifest in the store, so that ``support-bot/7`` starts again
without the database, and an alias that cannot be looked up counts as what it last was here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import ModelNotFoundError, StoreError
from toque.registry.download import disk
from toque.registry.names import AliasRef, CatalogRef, VersionRef, parse_reference
from toque.registry.progress import Report, silent
from toque.registry.record import ModelRecord
from toque.registry.store import Store, key_of

if TYPE_CHECKING:
    from toque.registry.registry import Registry
    from toque.registry.version import ModelVersion

log = logging.getLogger("toque.registry")


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """What a reference means. ``reference`` never moves: it names the same files for as long as they exist.

    A model that was only pulled has its own name as ``model`` and the version 0; a path of this machine that is no
    model of the store has no digest either.
    """

    model: str
    version: int
    digest: str  # sha256 over the files' names and contents
    size: int  # bytes of all files
    alias: str = ""  # the one that was followed

    @property
    def reference(self) -> str:
        return f"{self.model}/{self.version}" if self.version else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedVersion(PinnedVersion):
    """A version whose files are on this machine. ``path`` is what a loader opens: a GGUF file or a folder."""

    path: Path


def pin_version(reference: str, *, store: Store | None = None, report: Report = silent) -> PinnedVersion:
    """What ``reference`` means now. Only what is known by its source alone (``hf:…``) is downloaded for it.

    Raises RequestError for a malformed reference, ModelNotFoundError when there is no such model, version or alias,
    StoreError when the database is away and this machine does not remember, and as `Store.pull`.
    """
    store = Store() if store is None else store
    local = _local(reference)
    if local is not None:
        return local
    parsed = parse_reference(reference)
    record = None if isinstance(parsed, AliasRef) else store.find(str(parsed))
    if record is None and isinstance(parsed, VersionRef | AliasRef | CatalogRef):
        found = lookup(store, parsed)
        if found is not None:
            return found
    if record is None:
        store.pull(reference, report)
        record = store.show(reference)
    return _of_manifest(record)


def resolve_version(
    reference: str, *, store: Store | None = None, report: Report = silent
) -> ResolvedVersion:
    """What ``reference`` means now, with its files on this machine. Raises as `pin_version` and `Store.pull`."""
    store = Store() if store is None else store
    pinned = pin_version(reference, store=store, report=report)
    if _local(reference) is not None:
        path = store.resolve(reference)
        return ResolvedVersion(pinned.model, 0, "", pinned.size, path=path)
    path = store.pull(pinned.reference, report)  # never a path of the working directory that is called so
    return ResolvedVersion(pinned.model, pinned.version, pinned.digest, pinned.size, pinned.alias, path=path)


def bring(store: Store, parsed: VersionRef | AliasRef | CatalogRef, report: Report) -> ModelRecord | None:
    """The manifest of the version that is meant, its files fetched if need be. As `lookup` otherwise."""
    pinned = lookup(store, parsed)
    if pinned is None:
        return None
    record = store.find(pinned.reference)
    if record is not None and store.whole(record):
        return record
    from toque.registry.registry import Registry

    with Registry(store) as registry:
        return registry.bring(find_version(registry, VersionRef(pinned.model, pinned.version)), report)


def lookup(store: Store, parsed: VersionRef | AliasRef | CatalogRef) -> PinnedVersion | None:
    """The version that the registry means by a name, or what it meant when it could last be asked.

    None where a plain name is none of the registry's. Raises ModelNotFoundError for a version or an alias that does
    not exist, and StoreError when the database is away and this machine does not remember.
    """
    plain = isinstance(parsed, CatalogRef)
    if not store.registry.exists(store.home):
        if plain:
            return None
        raise ModelNotFoundError(f"{str(parsed)!a}: no model is registered here", param="model")
    from toque.registry.registry import Registry

    try:
        with Registry(store) as registry:
            version = find_version(registry, parsed)
    except ModelNotFoundError:
        if plain:
            return None
        raise
    except StoreError as error:
        record = _remembered(store, parsed)
        if record is not None:
            log.warning("%s is %s, as it last was: %s", parsed, record.name, error.message)
            return _of_manifest(record, parsed)
        if str(parsed) in store.catalog:
            return None
        raise
    alias = parsed.alias if isinstance(parsed, AliasRef) else ""
    return PinnedVersion(version.model, version.version, version.digest, version.size, alias)


def files_in_use(store: Store) -> set[str]:
    """sha256 of every file that a version of the registry needs."""
    from toque.registry.registry import Registry

    with Registry(store) as registry:
        return registry.database.files_in_use()


def find_version(registry: Registry, parsed: VersionRef | AliasRef | CatalogRef) -> ModelVersion:
    """The READY version that is meant. ModelNotFoundError says what there is instead."""
    from toque.registry.version import Status

    database = registry.database
    if isinstance(parsed, VersionRef):
        version = database.find(parsed.model, parsed.version)
    elif isinstance(parsed, AliasRef) and parsed.alias != "latest":
        version = database.aliased(parsed.model, parsed.alias)
    else:
        version = database.newest(parsed.name if isinstance(parsed, CatalogRef) else parsed.model)
    if version is None:
        raise ModelNotFoundError(f"the registry has no {str(parsed)!a}", param="model")
    if version.status is not Status.READY:
        why = f": {version.problem}" if version.problem else ""
        raise ModelNotFoundError(f"{version.reference} is {version.status}{why}", param="model")
    if not isinstance(parsed, VersionRef):
        _remember(registry.store, parsed, version.version)
    return version


def _of_manifest(record: ModelRecord, parsed: object = None) -> PinnedVersion:
    name = parse_reference(record.name)
    alias = parsed.alias if isinstance(parsed, AliasRef) else ""
    if isinstance(name, VersionRef):
        return PinnedVersion(name.model, name.version, record.digest, record.size, alias)
    return PinnedVersion(record.name, 0, record.digest, record.size)


def _local(reference: str) -> PinnedVersion | None:
    """A path of this machine, which has no version: what stands there now is what is loaded."""
    text = reference.removeprefix("file:")
    path = Path(text).expanduser()
    if not text or (":" in text and "/" not in text) or not path.exists():
        return None
    files = [path] if path.is_file() else [entry for entry in path.iterdir() if entry.is_file()]
    return PinnedVersion(str(path.absolute()), 0, "", sum(file.stat().st_size for file in files))


def _memory(store: Store, parsed: AliasRef | CatalogRef) -> Path:
    return store.home / "aliases" / f"{key_of(str(parsed))}.json"


def _remember(store: Store, parsed: AliasRef | CatalogRef, version: int) -> None:
    path = _memory(store, parsed)
    model = parsed.model if isinstance(parsed, AliasRef) else parsed.name
    content = json.dumps({"of": str(parsed), "is": f"{model}/{version}"})
    try:
        if path.exists() and path.read_text(encoding="utf-8") == content:
            return
        with disk(str(parsed)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, path)
    except (OSError, StoreError) as error:  # the answer is right all the same
        log.warning("what %s points to cannot be remembered: %s", parsed, error)


def _remembered(store: Store, parsed: VersionRef | AliasRef | CatalogRef) -> ModelRecord | None:
    """The manifest of what a reference meant when the database could last be asked, if its files are still here."""
    name = str(parsed)
    if not isinstance(parsed, VersionRef):
        try:
            name = json.loads(_memory(store, parsed).read_text(encoding="utf-8"))["is"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
    record = store.find(name)
    return record if record is not None and store.whole(record) else None
