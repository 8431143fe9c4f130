"""``/admin/v1/{models,versions,aliases}``: what is registered, and where names such as production point.

Each needs a key that may administer, where keys are needed at all. Everything is asked in a thread of the registry's
own; while its database is away these paths answer 503, and what is served goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from toque.errors import ModelNotFoundError, NotFoundError, RequestError, ToqueError
from toque.gateway.gateway import Gateway
from toque.gateway.http.admin_access import check_admin
from toque.gateway.http.body import decode
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.generate import receive_json
from toque.gateway.http.operations import Operation
from toque.gateway.http.parameters import Parameter, read_query
from toque.registry.names import AliasRef, FileRef, check_alias, check_name, parse_reference
from toque.registry.version import (
    Alias,
    AliasEvent,
    EvalResult,
    Lineage,
    ModelVersion,
    RegisteredModel,
    VersionInput,
)

if TYPE_CHECKING:
    from toque.registry.reader import RegistryReader
    from toque.registry.registry import Registry

log = logging.getLogger("toque.gateway")
T = TypeVar("T")
B = TypeVar("B", bound=Struct)

_MODEL = Parameter("model", "Only those of this model.", {"type": "string", "minLength": 1, "maxLength": 96})
_ALL = Parameter("all", "`true`: also those that failed or are archived.", {"enum": ["true", "false"]})


class RegisteredModels(Struct):
    object: str
    data: list[RegisteredModel]


class ModelVersions(Struct):
    """Without their files and cards, which each version's own path has."""

    object: str
    data: list[ModelVersion]


class VersionDetails(Struct):
    version: ModelVersion
    lineage: Lineage | None
    inputs: list[VersionInput]
    evaluations: list[EvalResult]


class ArchivedVersion(Struct):
    version: ModelVersion


class RegisteredVersion(Struct):
    """``created`` is false when the model had a version with exactly these files already."""

    version: ModelVersion
    created: bool


class Aliases(Struct):
    object: str
    data: list[Alias]


class AliasDetails(Struct):
    """``version`` is null once the alias was removed; ``events`` are its moves, oldest first. ``proposed``: after a
    move, the deployments here that follow the alias and are offered a rollout."""

    model: str
    alias: str
    version: int | None
    events: list[AliasEvent]
    proposed: list[str] = []


class RegisterBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``source``: a reference that this server can fetch (``hf:``, ``pypi:``, ``s3:``, ``mlflow:``, a version)."""

    source: Annotated[str, Meta(min_length=1, max_length=512)]
    model: Annotated[str, Meta(min_length=1, max_length=96)]
    parent: Annotated[str, Meta(max_length=512)] = ""
    alias: Annotated[str, Meta(max_length=64)] = ""
    tags: dict[str, str] = {}


class AliasBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``expected``: the version that it points to now, else 409: nobody else's move is undone unseen."""

    version: Annotated[int, Meta(ge=1, le=10**9)]
    expected: Annotated[int, Meta(ge=1, le=10**9)] | None = None


async def list_registered(exchange: Exchange, gateway: Gateway) -> None:
    _parameters(exchange, ())
    await _list(exchange, gateway, lambda registry: registry.database.models())


async def list_versions(exchange: Exchange, gateway: Gateway) -> None:
    """Query: ``model``, for those of one only; ``all=true``, also for those that failed or are archived."""
    asked = _parameters(exchange, (_MODEL, _ALL))
    every, name = asked.get("all", "false"), asked.get("model")
    if every not in ("true", "false"):
        raise RequestError(f"all is true or false, got {every[:20]!r}", param="all")
    await _list(exchange, gateway, lambda registry: registry.database.versions(name, every=every == "true"))


async def show_version(exchange: Exchange, gateway: Gateway) -> None:
    """By ``name/7``, ``name@alias``, or a name for its newest version."""
    reference = _id(exchange)

    def details(registry: Registry) -> dict[str, Any]:
        version = registry.find(reference)
        run, inputs, results = registry.database.origin(version.model, version.version)
        return {"version": version, "lineage": run, "inputs": inputs, "evaluations": results}

    await _answer(exchange, await _ask(exchange, gateway, details))


async def register_version(exchange: Exchange, gateway: Gateway) -> None:
    """Answers once its files are fetched and stored. A path of this server is no source: it is not the caller's."""
    reader = _reader(exchange, gateway)
    body = await _body(exchange, gateway, RegisterBody)
    if isinstance(parse_reference(body.source), FileRef):
        raise RequestError("a path of the server cannot be registered from elsewhere", param="source")
    done = await reader.register(
        body.source, body.model, parent=body.parent, alias=body.alias, tags=body.tags, actor=_actor(exchange)
    )
    _note(exchange, f"registered {done.version.reference}")
    if body.alias:
        await _offer(exchange, gateway, body.model, body.alias, done.version)
    await _answer(exchange, {"version": done.version, "created": done.created})


async def archive_version(exchange: Exchange, gateway: Gateway) -> None:
    """Nothing resolves to it any more; what runs goes on. 409 while an alias points to it."""
    reference, actor = _id(exchange), _actor(exchange)
    version = await _ask(exchange, gateway, lambda registry: registry.remove(reference, actor=actor))
    _note(exchange, f"archived {version.reference}")
    await _answer(exchange, {"version": version})


async def list_aliases(exchange: Exchange, gateway: Gateway) -> None:
    """Query: ``model``, for those of one only."""
    name = _parameters(exchange, (_MODEL,)).get("model")
    await _list(exchange, gateway, lambda registry: registry.database.aliases(name))


async def show_alias(exchange: Exchange, gateway: Gateway) -> None:
    """With every move that it has made."""
    await _answer(exchange, await _ask(exchange, gateway, _details(*_alias(exchange))))


async def move_alias(exchange: Exchange, gateway: Gateway) -> None:
    """One step: whoever resolves the alias sees the old version or the new one."""
    _reader(exchange, gateway)
    model, alias = _alias(exchange)
    check_alias(alias)
    body = await _body(exchange, gateway, AliasBody)
    actor = _actor(exchange)

    def move(registry: Registry) -> ModelVersion:
        registry.database.move_alias(model, alias, body.version, actor=actor, expected=body.expected)
        return registry.find(f"{model}/{body.version}")

    version = await _ask(exchange, gateway, move)
    _note(exchange, f"{model}@{alias} points to {version.reference}")
    proposed = await _offer(exchange, gateway, model, alias, version)
    details = await _ask(exchange, gateway, _details(model, alias))
    await _answer(exchange, {**details, "proposed": proposed})


async def remove_alias(exchange: Exchange, gateway: Gateway) -> None:
    model, alias = _alias(exchange)
    actor = _actor(exchange)
    await _ask(exchange, gateway, lambda registry: registry.database.remove_alias(model, alias, actor=actor))
    _note(exchange, f"{model}@{alias} removed")
    await _offer(exchange, gateway, model, alias, None)
    await show_alias(exchange, gateway)


def _details(model: str, alias: str) -> Callable[[Registry], dict[str, Any]]:
    def details(registry: Registry) -> dict[str, Any]:
        events = registry.database.alias_events(model, alias)
        if not events:
            raise NotFoundError(f"{model} has no alias {alias!a}", param="id")
        return {"model": model, "alias": alias, "version": events[-1].version, "events": events}

    return details


async def _offer(
    exchange: Exchange, gateway: Gateway, model: str, alias: str, version: ModelVersion | None
) -> list[str]:
    """The deployments here that are offered a rollout. The alias has moved by now, whatever becomes of this."""
    if gateway.fleet is None:
        return []
    label, digest = ("", "") if version is None else (version.reference, version.digest)
    try:
        return await gateway.fleet.propose(model, alias, label, digest, _actor(exchange))
    except ToqueError as error:
        log.warning("registry: no rollout of %s@%s is proposed: %s", model, alias, error.message)
        return []


def _reader(exchange: Exchange, gateway: Gateway) -> RegistryReader:
    check_admin(exchange)
    if gateway.registry is None:
        raise NotFoundError("this server administers no registry", code="no_registry")
    return gateway.registry


async def _ask(exchange: Exchange, gateway: Gateway, question: Callable[[Registry], T]) -> T:
    return await _reader(exchange, gateway).ask(question)


async def _list(exchange: Exchange, gateway: Gateway, question: Callable[[Registry], list[T]]) -> None:
    try:
        data = await _ask(exchange, gateway, question)
    except ModelNotFoundError:  # nobody has registered anything yet
        data = []
    await _answer(exchange, {"object": "list", "data": data})


def _parameters(exchange: Exchange, known: tuple[Parameter, ...]) -> dict[str, str]:
    asked = read_query(exchange, known)
    if "model" in asked:
        check_name(asked["model"])
    return asked


def _id(exchange: Exchange) -> str:
    reference: str = exchange.scope["path_params"]["id"]
    return reference


def _alias(exchange: Exchange) -> tuple[str, str]:
    parsed = parse_reference(_id(exchange))
    if not isinstance(parsed, AliasRef):
        raise RequestError(f"expected model@alias, got {_id(exchange)[:80]!a}", param="id")
    return parsed.model, parsed.alias


async def _body(exchange: Exchange, gateway: Gateway, kind: type[B]) -> B:
    from toque.fleet.parse import parse

    return parse(decode(await receive_json(exchange, gateway) or b"{}", dict), kind)


async def _answer(exchange: Exchange, value: Any) -> None:
    await exchange.answer(200, msgspec.json.encode(value))


def _actor(exchange: Exchange) -> str:
    return f"key {exchange.caller.key_id}" if exchange.caller.key_id else "anybody"


def _note(exchange: Exchange, what: str) -> None:
    log.info("registry: %s by %s", what, _actor(exchange))


_READ = (400, 404, 429, 503)
_CHANGE = (*_READ, 409, 413)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/admin/v1/models",
        list_registered,
        "The registered models, with their aliases.",
        answer=RegisteredModels,
        statuses=_READ,
    ),
    Operation(
        "GET",
        "/admin/v1/versions",
        list_versions,
        "The versions of all registered models, or of one.",
        answer=ModelVersions,
        parameters=(_MODEL, _ALL),
        statuses=_READ,
    ),
    Operation(
        "POST",
        "/admin/v1/versions",
        register_version,
        "Make what a reference stands for the next version of a model.",
        answer=RegisteredVersion,
        document=RegisterBody,
        statuses=(*_CHANGE, 422, 502),
    ),
    Operation(
        "GET",
        "/admin/v1/versions/{id:path}",
        show_version,
        "One version, with its files, lineage and evaluations.",
        answer=VersionDetails,
        statuses=_READ,
    ),
    Operation(
        "DELETE",
        "/admin/v1/versions/{id:path}",
        archive_version,
        "Retire a version; its lineage stays.",
        answer=ArchivedVersion,
        statuses=_CHANGE,
    ),
    Operation(
        "GET",
        "/admin/v1/aliases",
        list_aliases,
        "Where aliases point.",
        answer=Aliases,
        parameters=(_MODEL,),
        statuses=_READ,
    ),
    Operation(
        "GET",
        "/admin/v1/aliases/{id}",
        show_alias,
        "One alias (model@alias), with every move that it made.",
        answer=AliasDetails,
        statuses=_READ,
    ),
    Operation(
        "POST",
        "/admin/v1/aliases/{id}",
        move_alias,
        "Make an alias point to a version, in one step.",
        answer=AliasDetails,
        document=AliasBody,
        statuses=_CHANGE,
    ),
    Operation(
        "DELETE",
        "/admin/v1/aliases/{id}",
        remove_alias,
        "Remove an alias.",
        answer=AliasDetails,
        statuses=_CHANGE,
    ),
)
