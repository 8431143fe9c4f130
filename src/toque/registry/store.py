"""The models of this machine: a small content-addressed store that any number of processes may share.

::

    home/
      blobs/sha256-<digest>        file contents, read-only, each once however many models have it
      manifests/<hash>.json        one ModelRecord each; <hash> comes from the model's name, which is never a path
      models/<digest>/<file name>  links to blobs under the files' own names: what a loader opens
      partial/<hash>/              downloads under way or cut off
      aliases/<hash>.json          what an alias last pointed to, for when the registry's database is away
      locks/                       one per model, and one for changes of the store
      registry.db                  the registry's metadata, unless a setting puts it elsewhere
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from toque.errors import FormatError, ModelNotFoundError, RequestError, StoreError
from toque.registry import catalog as catalogs
from toque.registry.catalog import CatalogEntry
from toque.registry.download import disk
from toque.registry.home import default_home
from toque.registry.intake import entrance, take_in
from toque.registry.locks import locked
from toque.registry.names import AliasRef, CatalogRef, VersionRef, check_name, parse_reference
from toque.registry.progress import LogProgress, Progress, Report, silent
from toque.registry.record import ModelRecord, StoredFile, dump, load
from toque.registry.settings import RegistrySettings, from_environment
from toque.registry.sources.base import Fetched, plain

log = logging.getLogger("toque.registry")


class Store:
    """Pulls, finds and removes models.

    Guarantees: a model is visible only when all its files are complete and match their digests; of several processes
    that pull the same model one downloads and the others wait for it; a pull that was cut off continues where it
    stopped; removing a model never removes a file that another model, or a version of the registry, has.

    What the manifests know is answered from them alone. The registry's database is asked (and its packages imported)
    only for an alias, for a version that is not here yet, and for a name that was not pulled.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        catalog: Mapping[str, CatalogEntry] | None = None,
        registry: RegistrySettings | None = None,
    ) -> None:
        """``registry`` defaults to what TOQUE_REGISTRY_URL and TOQUE_REGISTRY_BLOBS say."""
        self.home = (default_home() if home is None else Path(home)).absolute()
        self.registry = from_environment() if registry is None else registry
        self._catalog = catalog

    @property
    def catalog(self) -> Mapping[str, CatalogEntry]:
        """The short names; read when the store does not know a name itself."""
        return catalogs.builtin() if self._catalog is None else self._catalog

    def resolve(self, reference: str, report: Report | None = None) -> Path:
        """What to load for a name, a version, a source URI, or a path that exists; pulled first if need be.

        Without a ``report`` a download is told to the log. Raises as `pull`, and ModelNotFoundError for a path that
        does not exist.
        """
        if reference.startswith("file:"):
            reference = reference.removeprefix("file:")
        path = Path(reference).expanduser()
        if ("/" in reference or reference.endswith(".gguf") or ":" not in reference) and path.exists():
            return path.absolute()
        if (
            ":" not in reference
            and ("/" in reference or reference.endswith(".gguf"))
            and not _is_version(reference)
        ):
            raise ModelNotFoundError(f"there is no file or folder {reference[:200]!a}", param="model")
        return self.pull(reference, LogProgress(log) if report is None else report)

    def pull(self, reference: str, report: Report = silent, *, name: str | None = None) -> Path:
        """Bring a model into the store, unless it is there, and return the file or folder to load.

        ``name`` is what it is called from then on (default: the reference itself). Raises RequestError for a
        reference that is not one, DownloadError, StoreError, or FormatError when what came is no model.
        """
        parsed = parse_reference(reference)
        if isinstance(parsed, VersionRef | AliasRef):
            if name is not None:
                raise RequestError(
                    f"{reference} has a name: a version cannot be called {name[:60]!a}", param="name"
                )
            version = self._version(parsed, report)
            assert version is not None  # only a plain name can be unknown to the registry
            return self.open(version)
        called = str(parsed) if name is None else check_name(name)
        if isinstance(parsed, CatalogRef) and name is None and self.find(called) is None:
            newest = self._version(parsed, report)
            if newest is not None:
                return self.open(newest)
        found = self.find(called)
        if found is not None and self.whole(found):
            return self.open(found)
        entry = catalogs.find(parsed.name, self.catalog) if isinstance(parsed, CatalogRef) else None
        with self.working(called, report) as work:
            found = self.find(called)  # somebody else may have brought it while we waited
            if found is not None and self.whole(found):
                return self.open(found)
            try:
                taken = take_in(parsed, entry, work, report, called)
            except FormatError:
                shutil.rmtree(work, ignore_errors=True)  # complete, and no model: nothing to continue
                raise
            record = replace(taken.record, pulled_at=int(time.time()))
            self.commit(record, taken.files)
            shutil.rmtree(work, ignore_errors=True)
        return self.open(record)

    @contextmanager
    def working(self, name: str, report: Report = silent) -> Iterator[Path]:
        """A folder for the files of what is being brought; nobody else on this machine brings it meanwhile.

        It stays as it is left, for the next attempt.
        """
        key = key_of(name)
        with locked(self.home / "locks" / f"{key}.lock", lambda: report(Progress("wait", name))):
            work = self.home / "partial" / key
            with disk(name):
                work.mkdir(parents=True, exist_ok=True)
                os.utime(work)  # a sweep takes folders that nobody has touched for long
            yield work

    def list(self) -> list[ModelRecord]:
        """Every model, by name. A manifest that cannot be read is logged and left out."""
        records = []
        for path in sorted((self.home / "manifests").glob("*.json")):
            try:
                records.append(load(path.read_bytes(), path.name))
            except (OSError, StoreError) as error:
                log.warning("%s is left out: %s", path, error)
        return sorted(records, key=lambda record: record.name)

    def show(self, name: str) -> ModelRecord:
        """The record of a model. Raises RequestError for a malformed name, ModelNotFoundError for an unknown one."""
        parsed = parse_reference(name)
        called = str(parsed)
        record = self.find(called)
        if record is None and isinstance(parsed, AliasRef | CatalogRef) and self.registry.exists(self.home):
            from toque.registry.versions import lookup

            pinned = lookup(self, parsed)
            record = None if pinned is None else self.find(pinned.reference)
        if record is None:
            hint = " (the catalog has it: pull it)" if called in self.catalog else ""
            raise ModelNotFoundError(f"{called!a} is not in the store{hint}", param="model")
        return record

    def path(self, name: str) -> Path:
        """What to load for a model of the store; never pulls. Raises as `show`, or StoreError when it is damaged."""
        return self.open(self.show(name))

    def remove(self, name: str) -> int:
        """Forget a model and free the files that nothing else has; the bytes freed.

        With a registry whose database cannot be asked, no file is freed: a sweep does it later.
        """
        record = self.show(name)
        with locked(self.change_lock):
            self._manifest(record.name).unlink(missing_ok=True)
            others = self.list()
            if all(other.digest != record.digest for other in others):
                shutil.rmtree(self.links(record.digest), ignore_errors=True)
            kept = {file.sha256 for other in others for file in other.files} | self._held(record)
            freed = 0
            for file in {file.sha256: file for file in record.files}.values():
                if file.sha256 not in kept:
                    blob = self.blob(file.sha256)
                    if blob.exists():
                        freed += file.size
                        blob.unlink()
        shutil.rmtree(self.home / "partial" / key_of(record.name), ignore_errors=True)
        return freed

    def _held(self, record: ModelRecord) -> set[str]:
        """Which of a model's files the registry has versions of."""
        if not self.registry.exists(self.home):
            return set()
        from toque.registry.versions import files_in_use

        try:
            return files_in_use(self)
        except StoreError as error:
            log.warning("no file of %s is freed: %s", record.name, error)
            return {file.sha256 for file in record.files}

    def export(self, name: str, folder: Path) -> Path:
        """Copy a model's files under their own names into ``folder``; what to load there."""
        record = self.show(name)
        target = folder if len(record.files) == 1 else folder / _safe_folder(record)
        for file in record.files:
            path = target / file.name
            with disk(file.name):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(path.name + ".copying")
                shutil.copyfile(self.blob(file.sha256), partial)
                os.replace(partial, path)
        return entrance(record, target)

    @property
    def change_lock(self) -> Path:
        """Held while blobs and manifests come or go."""
        return self.home / "locks" / "store.lock"

    def blob(self, sha256: str) -> Path:
        return self.home / "blobs" / f"sha256-{sha256}"

    def _manifest(self, name: str) -> Path:
        return self.home / "manifests" / f"{key_of(name)}.json"

    def links(self, digest: str) -> Path:
        """The folder of links that a loader opens, of the model with this digest."""
        return self.home / "models" / digest[:32]

    def find(self, name: str) -> ModelRecord | None:
        """The manifest of exactly that name. Raises StoreError when it is damaged."""
        path = self._manifest(name)
        try:
            return load(path.read_bytes(), path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error

    def whole(self, record: ModelRecord) -> bool:
        """Whether every blob is there in its full size; their content was checked when they came."""
        return all(map(self.holds, record.files))

    def holds(self, file: StoredFile) -> bool:
        try:
            return self.blob(file.sha256).stat().st_size == file.size
        except OSError:
            return False

    def open(self, record: ModelRecord) -> Path:
        """The file or folder to load, with its links made anew if they are gone."""
        if not self.whole(record):
            raise StoreError(
                f"{record.name}: a file is missing or cut in {self.home / 'blobs'}: pull it again"
            )
        folder = self.links(record.digest)
        for file in record.files:
            link = folder / file.name
            if not plain(file.name):
                raise StoreError(f"{record.name}: the manifest names a file {file.name[:60]!a}")
            if not link.exists():
                self._link(link, file)
        return entrance(record, folder)

    def _link(self, link: Path, file: StoredFile) -> None:
        target = os.path.relpath(self.blob(file.sha256), link.parent)
        # Nothing locks this: several threads and processes may make the same link, each under a name of its own.
        temporary = link.with_name(f".{link.name}.{os.getpid()}.{threading.get_ident()}")
        with disk(file.name):
            link.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            os.replace(temporary, link)

    def commit(self, record: ModelRecord, files: Iterable[Fetched], *, manifest: bool = True) -> None:
        """Blobs first, then the manifest: whoever sees the manifest finds everything it names.

        ``files`` are those that the store may not have yet. StoreError when others are gone by now.
        """
        with locked(self.change_lock), disk(record.name):
            (self.home / "blobs").mkdir(parents=True, exist_ok=True)
            for file in files:
                blob = self.blob(file.sha256)
                if blob.exists() and blob.stat().st_size == file.path.stat().st_size:
                    file.path.unlink()
                    os.utime(blob)  # in use again: the next sweep's grace begins now
                    continue
                sync(file.path)
                file.path.chmod(0o444)
                os.replace(file.path, blob)
            if not self.whole(record):
                raise StoreError(f"{record.name}: a file is not in the store any more; try again")
            if manifest:
                self._write(record)

    def _write(self, record: ModelRecord) -> None:
        manifest = self._manifest(record.name)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        temporary = manifest.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(dump(record))
        sync(temporary)
        os.replace(temporary, manifest)

    def forget(self, name: str) -> None:
        """Remove a manifest and leave the files to a sweep (`toque.registry.gc`)."""
        with locked(self.change_lock):
            self._manifest(name).unlink(missing_ok=True)

    def _version(self, parsed: VersionRef | AliasRef | CatalogRef, report: Report) -> ModelRecord | None:
        """The manifest of a version of the registry, brought here if need be; None: a name that it does not know."""
        found = self.find(str(parsed)) if isinstance(parsed, VersionRef) else None
        if found is not None and self.whole(found):
            return found
        if isinstance(parsed, CatalogRef) and not self.registry.exists(self.home):
            return None
        from toque.registry.versions import bring

        return bring(self, parsed, report)


def _is_version(reference: str) -> bool:
    name, _, version = reference.partition("/")
    return version.isdecimal() and "/" not in name


def key_of(name: str) -> str:
    """A file name for a model's name, without anything of the name in it."""
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def _safe_folder(record: ModelRecord) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in record.name)[:96].lstrip(".") or "model"


def sync(path: Path) -> None:
    """The content is on disk before the name that promises it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
