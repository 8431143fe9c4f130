"""The registry's database: which versions there are, what their aliases are, where they come from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from sqlalchemy import Connection, String, Table, and_, func, insert, select, text, update

from toque.errors import ConflictError, ModelNotFoundError
from toque.registry.record import StoredFile
from toque.registry.signing import Signature
from toque.registry.tables import (
    alias_event,
    eval_result,
    lineage,
    model,
    model_alias,
    model_version,
    version_input,
    version_signature,
)
from toque.registry.version import (
    NO_ORIGIN,
    Alias,
    AliasEvent,
    EvalResult,
    Lineage,
    ModelVersion,
    Origin,
    RegisteredModel,
    Status,
    VersionInput,
    clean,
)
from toque.sql import Schema, SqlDatabase

SCHEMA = Schema("registry", "registry_version", Path(__file__).parent / "migrations")
_HEAVY = ("files", "card")  # left out of lists
_LIGHT = tuple(column for column in model_version.c if column.name not in _HEAVY)  # model, version, status, …
_STATUSES = {status.value: status for status in Status}


class RegistryDatabase(SqlDatabase):
    """Everything raises StoreError, naming the database, when it cannot be reached.

    Guarantees: a version's number is given once and never again; a READY version's row does not change any more,
    except that it can be ARCHIVED; an alias always points to a READY version, and each of its moves is one event, in
    the transaction that moves it: the events of an alias form a chain.
    """

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        """Opens ``url`` (as SQLAlchemy spells it) and brings its tables up to date."""
        super().__init__(url, SCHEMA, migrate=migrate)

    # --- versions ------------------------------------------------------------------------------------------

    def add(self, draft: ModelVersion, origin: Origin = NO_ORIGIN) -> int:
        """A PENDING version with what is known of its making; its number, the next of its model."""
        row = _fitted(model_version, to_builtins(draft))
        with self.write() as connection:
            connection.execute(
                self.insert(model)
                .values(name=draft.model, description="", tags={}, created_at=draft.created_at)
                .on_conflict_do_nothing()
            )
            self._lock(connection, draft.model)
            newest = select(func.max(model_version.c.version)).where(model_version.c.model == draft.model)
            number = (connection.execute(newest).scalar() or 0) + 1
            row |= {"version": number, "status": Status.PENDING.value}
            connection.execute(insert(model_version), row)
            key = {"model": draft.model, "version": number}
            if origin.lineage is not None:
                connection.execute(insert(lineage), _fitted(lineage, asdict(origin.lineage) | key))
            for position, given in enumerate(origin.inputs):
                values = asdict(given) | key | {"position": position}
                connection.execute(insert(version_input), _fitted(version_input, values))
            _add_evaluations(connection, draft.model, number, origin.evaluations)
        return number

    def ready(self, name: str, version: int, *, alias: str = "", actor: str = "") -> None:
        """Make a PENDING version READY, and ``alias`` point to it in the same moment. StoreError if it is not."""
        with self.write() as connection:
            self._lock(connection, name)
            self._change(connection, name, version, Status.PENDING, Status.READY)
            if alias:
                self._move(connection, name, alias, version, actor)

    def fail(self, name: str, version: int, problem: str) -> None:
        """A PENDING version will never be complete."""
        with self.write() as connection:
            self._lock(connection, name)
            self._change(connection, name, version, Status.PENDING, Status.FAILED, problem)

    def archive(self, name: str, version: int) -> None:
        """Retire a READY version. ConflictError while an alias points to it, ModelNotFoundError without one."""
        with self.write() as connection:
            self._lock(connection, name)
            pointing = select(model_alias.c.alias).where(
                model_alias.c.model == name, model_alias.c.version == version
            )
            aliases = [row[0] for row in connection.execute(pointing.order_by(model_alias.c.alias))]
            if aliases:
                raise ConflictError(
                    f"{name}/{version} is what {', '.join(f'{name}@{alias}' for alias in aliases)} points to: "
                    "move or remove the alias first",
                    param="version",
                )
            self._change(connection, name, version, Status.READY, Status.ARCHIVED)

    def expire_pending(self, before: int) -> list[str]:
        """Fail what has been PENDING since before that time: whoever brought its files is gone. The references."""
        stale = (model_version.c.status == Status.PENDING.value) & (model_version.c.created_at < before)
        with self.write() as connection:
            query = select(model_version.c.model, model_version.c.version).where(stale)
            found = [f"{name}/{version}" for name, version in connection.execute(query)]
            if found:
                values = {"status": Status.FAILED.value, "problem": "its registration broke off"}
                connection.execute(update(model_version).where(stale).values(values))
        return found

    def find(self, name: str, version: int) -> ModelVersion | None:
        return self._one((model_version.c.model == name) & (model_version.c.version == version))

    def find_digest(self, name: str, digest: str) -> ModelVersion | None:
        """The newest READY version of a model with these files."""
        same = (model_version.c.model == name) & (model_version.c.digest == digest)
        return self._one(same & (model_version.c.status == Status.READY.value))

    def newest(self, name: str) -> ModelVersion | None:
        """The READY version with the highest number."""
        return self._one((model_version.c.model == name) & (model_version.c.status == Status.READY.value))

    def aliased(self, name: str, alias: str) -> ModelVersion | None:
        pointed = select(model_alias.c.version).where(
            model_alias.c.model == name, model_alias.c.alias == alias
        )
        return self._one(
            (model_version.c.model == name) & (model_version.c.version == pointed.scalar_subquery())
        )

    def versions(
        self, name: str | None = None, *, every: bool = False, limit: int = 100_000
    ) -> list[ModelVersion]:
        """Versions by model and number, with their aliases but without files and cards: one query, however many.

        Those that FAILED or are ARCHIVED only if ``every``.
        """
        here = and_(
            model_alias.c.model == model_version.c.model, model_alias.c.version == model_version.c.version
        )
        query = select(*_LIGHT, model_alias.c.alias).join_from(model_version, model_alias, here, isouter=True)
        if name is not None:
            query = query.where(model_version.c.model == name)
        if not every:
            query = query.where(model_version.c.status.in_([Status.READY.value, Status.PENDING.value]))
        query = query.order_by(model_version.c.model, model_version.c.version, model_alias.c.alias).limit(
            limit
        )
        with self.read() as connection:
            rows = connection.execute(query).all()
        found: dict[tuple[str, int], ModelVersion] = {}
        names = [column.name for column in _LIGHT]
        for row in rows:
            key, alias = (row[0], row[1]), row[-1]
            known = found.get(key)
            if known is not None:  # again, with another alias
                found[key] = replace(known, aliases=(*known.aliases, alias))
                continue
            values = dict(zip(names, row, strict=False))
            values["status"] = _STATUSES[row[2]]
            found[key] = ModelVersion(**values, aliases=() if alias is None else (alias,))
        return list(found.values())

    def files_in_use(self, digests: Iterable[str] = ()) -> set[str]:
        """sha256 of every file of a PENDING or READY version, and of those with one of these model digests."""
        with self.read() as connection:
            return files_in_use(connection, digests)

    @contextmanager
    def without_new_rows(self) -> Iterator[Connection]:
        """A transaction during which nobody adds a version. Keep it short: registrations wait."""
        with self.write() as connection:
            if self.dialect == "postgresql":  # SQLite has one writer at a time anyway
                connection.execute(text("LOCK TABLE model_version IN SHARE ROW EXCLUSIVE MODE"))
            yield connection

    # --- models and their aliases --------------------------------------------------------------------------

    def models(self) -> list[RegisteredModel]:
        """Every model by name, with how many versions are ready and where its aliases point."""
        is_ready = (model_version.c.model == model.c.name) & (model_version.c.status == Status.READY.value)
        query = (
            select(*model.c, func.count(model_version.c.version), func.max(model_version.c.version))
            .join_from(model, model_version, is_ready, isouter=True)
            .group_by(model.c.name)
            .order_by(model.c.name)
        )
        with self.read() as connection:
            aliases: dict[str, dict[str, int]] = {}
            for row in connection.execute(select(model_alias).order_by(model_alias.c.alias)).mappings():
                aliases.setdefault(row["model"], {})[row["alias"]] = row["version"]
            rows = connection.execute(query).all()
        return [RegisteredModel(*row[:5], row[5] or 0, aliases.get(row[0], {})) for row in rows]

    def describe(
        self, name: str, *, description: str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Change what is said of a model as a whole. ModelNotFoundError when there is none."""
        values = {"description": description, "tags": None if tags is None else dict(tags)}
        changed = {key: value for key, value in values.items() if value is not None}
        with self.write() as connection:
            self._lock(connection, name)
            if changed:
                connection.execute(update(model).where(model.c.name == name).values(changed))

    def move_alias(
        self, name: str, alias: str, version: int, *, actor: str = "", expected: int | None = None
    ) -> int | None:
        """Make an alias point to a READY version; where it pointed before, None if it is new.

        With ``expected``, only if that is where it points now, else ConflictError: nobody else's move is undone
        unseen. ModelNotFoundError when there is no such version.
        """
        with self.write() as connection:
            self._lock(connection, name)
            return self._move(connection, name, alias, version, actor, expected)

    def remove_alias(self, name: str, alias: str, *, actor: str = "") -> int:
        """Where it pointed. ModelNotFoundError when there is none."""
        here = (model_alias.c.model == name) & (model_alias.c.alias == alias)
        with self.write() as connection:
            self._lock(connection, name)
            previous: int | None = connection.execute(select(model_alias.c.version).where(here)).scalar()
            if previous is None:
                raise ModelNotFoundError(f"{name} has no alias {alias!a}", param="alias")
            connection.execute(model_alias.delete().where(here))
            self._note(connection, name, alias, previous, None, actor)
        return previous

    def aliases(self, name: str | None = None) -> list[Alias]:
        query = select(model_alias).order_by(model_alias.c.model, model_alias.c.alias)
        if name is not None:
            query = query.where(model_alias.c.model == name)
        with self.read() as connection:
            return [Alias(**row) for row in connection.execute(query).mappings()]

    def alias_events(self, name: str, alias: str | None = None, limit: int = 1_000) -> list[AliasEvent]:
        """The moves of a model's aliases, oldest first; the last ``limit`` of them."""
        query = select(alias_event).where(alias_event.c.model == name)
        if alias is not None:
            query = query.where(alias_event.c.alias == alias)
        with self.read() as connection:
            rows = connection.execute(query.order_by(alias_event.c.id.desc()).limit(limit)).mappings().all()
        return [AliasEvent(**row) for row in reversed(rows)]

    # --- where versions come from --------------------------------------------------------------------------

    def origin(self, name: str, version: int) -> tuple[Lineage | None, list[VersionInput], list[EvalResult]]:
        with self.read() as connection:
            made = connection.execute(_of(lineage, name, version)).mappings().first()
            inputs = (
                connection.execute(_of(version_input, name, version).order_by("position")).mappings().all()
            )
            results = connection.execute(_of(eval_result, name, version).order_by("id")).mappings().all()
        return (
            None if made is None else Lineage(**_without_key(made)),
            [VersionInput(**_without_key(row)) for row in inputs],
            [EvalResult(**_without_key(row)) for row in results],
        )

    def children(self, name: str, version: int) -> list[str]:
        """References of the versions that were made from this one."""
        query = select(version_input.c.model, version_input.c.version).distinct()
        query = query.where(version_input.c.kind == "model", version_input.c.name == f"{name}/{version}")
        with self.read() as connection:
            rows = connection.execute(query.order_by(version_input.c.model, version_input.c.version))
            return [f"{child}/{number}" for child, number in rows]

    def add_evaluations(self, name: str, version: int, results: Iterable[EvalResult]) -> None:
        """More results; those that are there stay. ModelNotFoundError when there is no such version."""
        with self.write() as connection:
            self._lock(connection, name)
            if connection.execute(_of(model_version, name, version)).first() is None:
                raise ModelNotFoundError(f"there is no {name}/{version}", param="version")
            _add_evaluations(connection, name, version, results)

    # --- who has signed them -------------------------------------------------------------------------------

    def add_signature(self, name: str, version: int, signature: Signature, by: str) -> None:
        """One for each key: a later one takes the place of an earlier. ModelNotFoundError without the version."""
        table = version_signature
        row = {"model": name, "version": version, "key": signature.key}
        changes = {"value": signature.value, "signed_by": clean(by, 128), "at": microseconds()}
        with self.write() as connection:
            self._lock(connection, name)
            if connection.execute(_of(model_version, name, version)).first() is None:
                raise ModelNotFoundError(f"there is no {name}/{version}", param="version")
            statement = self.insert(table).values(**row, **changes)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["model", "version", "key"], set_=changes)
            )

    def signatures(self, name: str, version: int) -> list[Signature]:
        """Oldest first. Whether they are valid, and whom they are by, is not known here."""
        with self.read() as connection:
            query = _of(version_signature, name, version).order_by("at")
            return [Signature(**_without_key(row)) for row in connection.execute(query).mappings()]

    # --- the parts of a transaction ------------------------------------------------------------------------

    def _one(self, condition: Any) -> ModelVersion | None:
        query = select(model_version).where(condition).order_by(model_version.c.version.desc()).limit(1)
        with self.read() as connection:
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            pointing = select(model_alias.c.alias).where(
                model_alias.c.model == row["model"], model_alias.c.version == row["version"]
            )
            aliases = tuple(alias for (alias,) in connection.execute(pointing.order_by(model_alias.c.alias)))
        return _version({**row, "aliases": aliases})

    def _lock(self, connection: Connection, name: str) -> None:
        """Nobody else changes this model before the transaction ends. SQLite has one writer anyway."""
        query = select(model.c.name).where(model.c.name == name).with_for_update()
        if connection.execute(query).first() is None:
            raise ModelNotFoundError(f"{name!a} is not a registered model", param="model")

    def _change(
        self,
        connection: Connection,
        name: str,
        version: int,
        old: Status,
        new: Status,
        problem: str | None = None,
    ) -> None:
        here = (model_version.c.model == name) & (model_version.c.version == version)
        status = connection.execute(select(model_version.c.status).where(here)).scalar()
        if status is None:
            raise ModelNotFoundError(f"there is no {name}/{version}", param="version")
        if status != old:
            raise ConflictError(f"{name}/{version} is {status}, not {old}", param="version")
        values = {"status": new.value} | ({} if problem is None else {"problem": clean(problem, 2_000)})
        connection.execute(update(model_version).where(here).values(values))

    def _move(
        self,
        connection: Connection,
        name: str,
        alias: str,
        version: int,
        actor: str,
        expected: int | None = None,
    ) -> int | None:
        target = select(model_version.c.status).where(
            model_version.c.model == name, model_version.c.version == version
        )
        status = connection.execute(target).scalar()
        if status is None:
            raise ModelNotFoundError(f"there is no {name}/{version}", param="version")
        if status != Status.READY:
            raise ConflictError(
                f"{name}/{version} is {status}: an alias points to what is READY", param="version"
            )
        here = (model_alias.c.model == name) & (model_alias.c.alias == alias)
        previous: int | None = connection.execute(select(model_alias.c.version).where(here)).scalar()
        if expected is not None and previous != expected:
            found = "nowhere" if previous is None else f"to version {previous}"
            raise ConflictError(f"{name}@{alias} points {found}, not to version {expected}", param="expected")
        if previous == version:
            return previous
        now = microseconds()
        statement = self.insert(model_alias).values(model=name, alias=alias, version=version, moved_at=now)
        changes = {"version": version, "moved_at": now}
        connection.execute(statement.on_conflict_do_update(index_elements=["model", "alias"], set_=changes))
        self._note(connection, name, alias, previous, version, actor)
        return previous

    def _note(
        self,
        connection: Connection,
        name: str,
        alias: str,
        previous: int | None,
        version: int | None,
        actor: str,
    ) -> None:
        row = {"model": name, "alias": alias, "previous": previous, "version": version, "at": microseconds()}
        connection.execute(insert(alias_event), row | {"actor": clean(actor, 128)})


def files_in_use(connection: Connection, digests: Iterable[str] = ()) -> set[str]:
    """sha256 of every file of a PENDING or READY version, and of those with one of these model digests."""
    kept = model_version.c.status.in_([Status.PENDING.value, Status.READY.value])
    wanted = sorted(set(digests))
    conditions = [
        kept,
        *(model_version.c.digest.in_(wanted[i : i + 500]) for i in range(0, len(wanted), 500)),
    ]
    return {
        file["sha256"]
        for condition in conditions
        for (files,) in connection.execute(select(model_version.c.files).where(condition))
        for file in files
    }


def microseconds() -> int:
    return time.time_ns() // 1_000


def _add_evaluations(connection: Connection, name: str, version: int, results: Iterable[EvalResult]) -> None:
    rows = [_fitted(eval_result, asdict(result) | {"model": name, "version": version}) for result in results]
    if rows:
        connection.execute(insert(eval_result), rows)


def _of(table: Table, name: str, version: int) -> Any:
    return select(table).where(table.c.model == name, table.c.version == version)


def _version(row: Mapping[str, Any]) -> ModelVersion:
    files = tuple(StoredFile(**file) for file in row.get("files", ()))
    return ModelVersion(**{**row, "status": Status(row["status"]), "files": files})


def _without_key(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("id", "model", "version", "position")}


def _fitted(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the table has columns for, their texts short enough for them."""
    row: dict[str, Any] = {}
    for column in table.c:
        if column.name not in values:
            continue
        value = values[column.name]
        if isinstance(column.type, String) and isinstance(value, str):
            value = clean(value, column.type.length or 10_000)
        row[column.name] = value
    return row
