"""The registry: models whose versions never change, on a database for what is said of them and blobs for their files.

A registration, and what is left if it is killed at each step::

    files fetched into a working folder, described    nothing; the next attempt continues
    row PENDING with the files' digests               a PENDING row, which nothing resolves and a sweep fails
    blobs put (shared store, then this machine's)     the same; the digests in the row keep them from the sweep
    row READY, alias moved: one transaction           all of it
    manifest written on this machine                  a cache: written again when the version is first resolved
"""

from __future__ import annotations

import getpass
import logging
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import structs

from toque.errors import (
    FormatError,
    ModelNotFoundError,
    RequestError,
    StoreError,
    ToqueError,
)
from toque.registry.blobs import SharedBlobs
from toque.registry.database import RegistryDatabase, microseconds
from toque.registry.intake import Intake, take_in
from toque.registry.names import (
    AliasRef,
    CatalogRef,
    FileRef,
    Reference,
    VersionRef,
    check_alias,
    check_name,
    parse_reference,
)
from toque.registry.progress import Report, silent
from toque.registry.record import ModelRecord, StoredFile
from toque.registry.sources.base import Fetch
from toque.registry.store import Store
from toque.registry.version import EvalResult, Lineage, ModelVersion, Origin, Status, VersionInput
from toque.registry.versions import find_version

log = logging.getLogger("toque.registry")


@dataclass(frozen=True, slots=True)
class Registration:
    """``created`` is false when the model had a version with exactly these files already."""

    version: ModelVersion
    created: bool
    path: Path


class Registry:
    """One machine's way into a registry: its database, the shared blobs if there are any, and the local store.

    Guarantees: what `find_version` returns is READY, and every file of it is where `bring` finds it; the bytes that a
    reference with a number stands for never change. Everything blocks. Close it, or use it in a ``with`` block.
    """

    def __init__(self, store: Store | None = None) -> None:
        """``store.registry`` says where the database and the shared blobs are; they are opened when needed."""
        self.store = Store() if store is None else store
        self._database: RegistryDatabase | None = None
        self._blobs: SharedBlobs | None = None

    @property
    def database(self) -> RegistryDatabase:
        if self._database is None:
            self._database = RegistryDatabase(self.store.registry.database_url(self.store.home))
        return self._database

    @property
    def blobs(self) -> SharedBlobs | None:
        """None where files live on this machine alone."""
        if self._blobs is None and self.store.registry.blobs:
            self._blobs = SharedBlobs(self.store.registry.blobs)
        return self._blobs

    def find(self, reference: str) -> ModelVersion:
        """A version whatever its status, by a name, an alias or its number. ModelNotFoundError without one."""
        parsed = _registered(parse_reference(reference))
        if isinstance(parsed, VersionRef):
            version = self.database.find(parsed.model, parsed.version)
            if version is None:
                raise ModelNotFoundError(f"the registry has no {str(parsed)!a}", param="model")
            return version
        return find_version(self, parsed)

    def register(
        self,
        source: str,
        model: str,
        *,
        parent: str = "",
        alias: str = "",
        tags: Mapping[str, str] | None = None,
        inputs: tuple[VersionInput, ...] = (),
        evaluations: tuple[EvalResult, ...] = (),
        git_commit: str = "",
        actor: str = "",
        report: Report = silent,
    ) -> Registration:
        """Make a folder, a file, or what any reference stands for the next version of ``model``.

        The same files again are no new version; the alias moves all the same. ``parent`` is what it was made from.
        Raises as `Store.pull`, and RequestError or ModelNotFoundError for names, aliases and parents that are none.
        """
        check_name(model)
        if alias:
            check_alias(alias)
        parsed = _source(source)
        actor = actor or somebody()
        if isinstance(parsed, FileRef):
            self._check_new_name(model, "")
        else:
            self._check_new_name(model, str(parsed))
        parent_version = None if not parent else self._parent(parent, report)
        with self.store.working(f"register {model} {parsed}", report) as work:
            try:
                taken = self._taken(parsed, work, report)
            except FormatError:
                shutil.rmtree(work, ignore_errors=True)
                raise
            origin = _origin(taken, parent_version, parent, inputs, evaluations, git_commit)
            draft = structs.replace(_draft(model, taken, origin), created_by=actor, tags=dict(tags or {}))
            known = self.database.find_digest(model, draft.digest)
            if known is not None:
                if alias:
                    self.database.move_alias(model, alias, known.version, actor=actor)
                record = self.bring(known, report)
            else:
                record = self._publish(draft, origin, taken, alias, actor, report)
            shutil.rmtree(work, ignore_errors=True)
        if self.store.find(model) is not None and record.digest != self.store.show(model).digest:
            self.store.forget(model)  # from now on the plain name is the registry's newest version
        return Registration(self.find(record.name), known is None, self.store.open(record))

    def bring(self, version: ModelVersion, report: Report = silent) -> ModelRecord:
        """The version's manifest in the local store, its missing files fetched. StoreError or DownloadError if not."""
        record = _record(version)
        with self.store.working(record.name, report) as work:
            found = self.store.find(record.name)
            if found is not None and self.store.whole(found):
                return found
            missing = [file for file in record.files if not self.store.holds(file)]
            fetch = self._fetch(version, missing, work, report) if missing else Fetch(())
            self.store.commit(replace(record, pulled_at=int(time.time())), fetch.files)
            shutil.rmtree(work, ignore_errors=True)
        return record

    def remove(self, reference: str, *, actor: str = "") -> ModelVersion:
        """Archive a version: nothing resolves to it any more, and the next sweep frees what only it has.

        Its row and its lineage stay. RequestError while an alias points to it.
        """
        version = self.find(reference)
        self.database.archive(version.model, version.version)
        self.store.forget(version.reference)
        log.info("%s was archived by %s", version.reference, actor or somebody())
        return structs.replace(version, status=Status.ARCHIVED)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _publish(
        self, draft: ModelVersion, origin: Origin, taken: Intake, alias: str, actor: str, report: Report
    ) -> ModelRecord:
        """From a draft to a READY version. What fails in between leaves a FAILED row that says why."""
        number = self.database.add(draft, origin)
        version = structs.replace(draft, version=number)
        record = replace(_record(version), pulled_at=int(time.time()))
        try:
            if self.blobs is not None:
                places = {file.name: file.path for file in taken.files}
                for file in record.files:
                    self.blobs.put(file, places.get(file.name) or self.store.blob(file.sha256), report)
            self.store.commit(record, taken.files, manifest=False)
            self.database.ready(draft.model, number, alias=alias, actor=actor)
        except BaseException as error:
            with suppress(ToqueError):  # else the row stays PENDING, and a sweep fails it
                self.database.fail(draft.model, number, str(error) or type(error).__name__)
            raise
        self.store.commit(record, ())
        return record

    def _taken(self, parsed: Reference, work: Path, report: Report) -> Intake:
        """The files of a source in ``work``; those of a model that the store has stay where they are."""
        if isinstance(parsed, VersionRef | AliasRef | CatalogRef):
            self.store.pull(str(parsed), report)
            return Intake(self.store.show(str(parsed)), Fetch(()))
        known = self.store.find(str(parsed))
        if known is not None and self.store.whole(known):
            return Intake(known, Fetch(()))
        return take_in(parsed, None, work, report, str(parsed))

    def _fetch(self, version: ModelVersion, missing: list[StoredFile], work: Path, report: Report) -> Fetch:
        if self.blobs is not None:
            return Fetch(tuple(self.blobs.get(file, work, report) for file in missing))
        origin = parse_reference(version.resolved_uri) if version.resolved_uri else None
        if origin is None or isinstance(origin, VersionRef | AliasRef | CatalogRef | FileRef):
            raise StoreError(
                f"{version.reference}: {missing[0].name} is not on this machine, and nowhere to be had from: it was "
                f"registered by {version.created_by or 'somebody'}; set registry.blobs to a store that all machines see"
            )
        taken = take_in(origin, None, work, report, version.reference)
        if taken.record.digest != version.digest:
            shutil.rmtree(work, ignore_errors=True)
            raise StoreError(
                f"{version.reference}: {origin} is not any more what was registered (digest "
                f"{taken.record.digest[:12]}, not {version.digest[:12]})"
            )
        return taken.fetch

    def _parent(self, reference: str, report: Report) -> ModelVersion | None:
        """The version that ``reference`` means; a model that was only pulled becomes one. None: a foreign name."""
        parsed = parse_reference(reference)
        if not isinstance(parsed, VersionRef | AliasRef | CatalogRef):
            return None
        name = parsed.name if isinstance(parsed, CatalogRef) else parsed.model
        if self.database.newest(name) is None and (
            self.store.find(name) is not None or name in self.store.catalog
        ):
            self.register(name, name, report=report)
        return find_version(self, parsed)

    def _check_new_name(self, model: str, source: str) -> None:
        """A name that the catalog, or a pull on this machine, gave to a model cannot become another one's."""
        if model == source or self.database.newest(model) is not None:
            return
        if self.store.find(model) is not None:
            self.register(model, model)  # what it has been so far is version 1
        elif model in self.store.catalog:
            raise RequestError(
                f"{model!r} is a name of the catalog: pull it first, which makes it version 1, or use another name",
                param="model",
            )


def _registered(parsed: Reference) -> VersionRef | AliasRef | CatalogRef:
    if not isinstance(parsed, VersionRef | AliasRef | CatalogRef):
        raise RequestError(f"{str(parsed)[:80]!a} is a source, not a model of the registry", param="model")
    return parsed


def _source(text: str) -> Reference:
    path = Path(text.removeprefix("file:")).expanduser()
    if (text.startswith("file:") or ":" not in text) and path.exists():
        return FileRef(str(path.absolute()))
    return parse_reference(text)


def _record(version: ModelVersion) -> ModelRecord:
    return ModelRecord(
        name=version.reference,
        source=version.resolved_uri or version.source_uri,
        files=version.files,
        license=version.license,
        format=version.format,
        architecture=version.arch,
        quantization=version.quantization,
        parameters=version.params,
        context_length=version.context_length,
        problem=version.problem,
    )


def _draft(model: str, taken: Intake, origin: Origin) -> ModelVersion:
    record = taken.record
    return ModelVersion(
        model=model,
        version=0,
        status=Status.PENDING,
        digest=record.digest,
        size=record.size,
        created_at=microseconds(),
        problem=record.problem,
        source_uri=record.source,
        resolved_uri=taken.fetch.resolved or record.source,
        format=record.format,
        arch=record.architecture,
        params=record.parameters,
        dtype=taken.fetch.origin.dtype,
        quantization=record.quantization,
        context_length=record.context_length,
        license=record.license or origin.license,
        base_model=origin.base_model,
        base_relation=origin.base_relation,
        files=record.files,
        card=origin.card,
    )


def _origin(
    taken: Intake,
    parent: ModelVersion | None,
    parent_text: str,
    given: tuple[VersionInput, ...],
    evaluations: tuple[EvalResult, ...],
    git_commit: str,
) -> Origin:
    """What the source says of itself, with what whoever registers it knows better."""
    origin = taken.fetch.origin
    lineage = origin.lineage or Lineage(system="import")
    if git_commit:
        lineage = replace(lineage, git_commit=git_commit)
    inputs = [*origin.inputs, *given]
    base = origin.base_model
    if parent is not None:
        base = parent.reference
        inputs.insert(0, VersionInput("model", base, parent.digest, "registry", base, "parent"))
    elif parent_text:
        base = parent_text
        inputs.insert(
            0, VersionInput("model", base, "", parent_text.partition(":")[0], parent_text, "parent")
        )
    relation = origin.base_relation or ("finetune" if base else "")
    return replace(
        origin,
        lineage=lineage,
        inputs=tuple(inputs),
        evaluations=(*origin.evaluations, *evaluations),
        base_model=base,
        base_relation=relation,
    )


def somebody() -> str:
    """Who this is, for the record: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
