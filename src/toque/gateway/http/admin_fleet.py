"""``/admin/v1/{deployments,replicas,rollouts}``: what runs here, and what shall.

Every change answers as soon as it is written, with the state as it is then; the fleet acts on it and the same path
says how far it has come. Each needs a key that may administer, where keys are needed at all. Bodies are strict: an
unknown field is an error that names it. All of them are JSON, an empty object where there is nothing to say: a web
page elsewhere can make a browser send other kinds unasked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from toque.errors import NotFoundError, RequestError
from toque.fleet.spec import DeploymentSpec, Replicas, RolloutPolicy
from toque.fleet.views import DeploymentView, ReplicaView, RolloutView
from toque.gateway.gateway import Gateway
from toque.gateway.http.admin_access import check_admin
from toque.gateway.http.body import decode
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.generate import receive_json
from toque.gateway.http.operations import Operation
from toque.gateway.http.parameters import Parameter, read_query

if TYPE_CHECKING:
    from toque.fleet.admin import FleetAdmin

log = logging.getLogger("toque.gateway")
_DEPLOYMENT = Parameter("deployment", "Only those of this deployment.")
T = TypeVar("T", bound=Struct)


class DeploymentList(Struct):
    object: str
    data: list[DeploymentView]


class ReplicaList(Struct):
    object: str
    data: list[ReplicaView]


class RolloutList(Struct):
    """The rollout of each deployment that has had one: the running one, or the last."""

    object: str
    data: list[RolloutView]


class DeletedDeployment(Struct):
    name: str
    deleted: bool


class ScaleBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Null leaves a bound as it is; a ``max_replicas`` below ``min_replicas`` is refused."""

    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, Meta(ge=1, le=1000)] | None = None


class RestartBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Engine options to change; null takes one back to its default."""

    engine: dict[str, bool | int | float | str | None] = {}


class RolloutBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``model``: a reference, "" for what the deployment's own means now. ``policy``: null is the deployment's."""

    model: str = ""
    policy: RolloutPolicy | None = None


class NoFields(Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


async def list_deployments(exchange: Exchange, gateway: Gateway) -> None:
    await _answer(exchange, {"object": "list", "data": await _fleet(exchange, gateway).deployments()})


async def deploy(exchange: Exchange, gateway: Gateway) -> None:
    """Makes the deployment of this name, or changes it to this. Another model or other engine options roll out."""
    from toque.fleet.parse import parse_spec

    fleet = _fleet(exchange, gateway)
    spec = parse_spec(decode(await receive_json(exchange, gateway), dict))
    view = await fleet.deploy(spec)
    _note(exchange, spec.name, f"deployed as {spec.model}")
    await _answer(exchange, view)


async def show_deployment(exchange: Exchange, gateway: Gateway) -> None:
    await _answer(exchange, await _fleet(exchange, gateway).deployment(_name(exchange)))


async def delete_deployment(exchange: Exchange, gateway: Gateway) -> None:
    """It is gone once its replicas have finished what they have."""
    name = _name(exchange)
    await _fleet(exchange, gateway).delete(name)
    _note(exchange, name, "deleted")
    await _answer(exchange, {"name": name, "deleted": True})


async def scale_deployment(exchange: Exchange, gateway: Gateway) -> None:
    fleet = _fleet(exchange, gateway)
    body = await _body(exchange, gateway, ScaleBody)
    if body.min_replicas is None and body.max_replicas is None:
        raise RequestError("give min_replicas, max_replicas or both", param="min_replicas")
    view = await fleet.scale(_name(exchange), body.min_replicas, body.max_replicas)
    scaling = view.spec.scaling
    _note(exchange, view.name, f"scaled to {scaling.min_replicas}..{scaling.max_replicas}")
    await _answer(exchange, view)


async def restart_deployment(exchange: Exchange, gateway: Gateway) -> None:
    """A rolling restart, with changed engine options where some are given."""
    fleet = _fleet(exchange, gateway)
    body = await _body(exchange, gateway, RestartBody)
    view = await fleet.restart(_name(exchange), body.engine or None)
    _note(exchange, view.deployment, "restarted")
    await _answer(exchange, view)


async def list_replicas(exchange: Exchange, gateway: Gateway) -> None:
    """Query: ``deployment``, for those of one only."""
    fleet = _fleet(exchange, gateway)
    deployment = read_query(exchange, (_DEPLOYMENT,)).get("deployment", "")
    await _answer(exchange, {"object": "list", "data": await fleet.replicas(deployment)})


async def list_rollouts(exchange: Exchange, gateway: Gateway) -> None:
    views = await _fleet(exchange, gateway).deployments()
    data = [view.rollout for view in views if view.rollout is not None]
    await _answer(exchange, {"object": "list", "data": data})


async def show_rollout(exchange: Exchange, gateway: Gateway) -> None:
    await _answer(exchange, await _fleet(exchange, gateway).rollout(_name(exchange)))


async def start_rollout(exchange: Exchange, gateway: Gateway) -> None:
    fleet = _fleet(exchange, gateway)
    body = await _body(exchange, gateway, RolloutBody)
    view = await fleet.start_rollout(_name(exchange), body.model, body.policy)
    _note(exchange, view.deployment, f"rollout of {view.new} begun")
    await _answer(exchange, view)


def _step(
    name: str, done: str, act: Callable[[FleetAdmin, str], Awaitable[Struct]]
) -> Callable[[Exchange, Gateway], Awaitable[None]]:
    """The handler of a change that needs no more than a deployment's name; ``name`` is its operation id."""

    async def handler(exchange: Exchange, gateway: Gateway) -> None:
        fleet = _fleet(exchange, gateway)
        await _body(exchange, gateway, NoFields)
        view = await act(fleet, _name(exchange))
        _note(exchange, _name(exchange), done)
        await _answer(exchange, view)

    handler.__name__ = name
    return handler


def _fleet(exchange: Exchange, gateway: Gateway) -> FleetAdmin:
    check_admin(exchange)
    if gateway.fleet is None:
        raise NotFoundError("this server administers no fleet", code="no_fleet")
    return gateway.fleet


def _name(exchange: Exchange) -> str:
    name: str = exchange.scope["path_params"]["id"]
    return name


async def _body(exchange: Exchange, gateway: Gateway, kind: type[T]) -> T:
    from toque.fleet.parse import parse

    return parse(decode(await receive_json(exchange, gateway) or b"{}", dict), kind)


async def _answer(exchange: Exchange, value: Any) -> None:
    await exchange.answer(200, msgspec.json.encode(value))


def _note(exchange: Exchange, deployment: str, what: str) -> None:
    log.info("deployment %s: %s by %s", deployment, what, exchange.caller.key_id or "anybody")


_READ = (400, 404, 503)
_CHANGE = (400, 404, 409, 413, 503)
_RESOLVE = (*_CHANGE, 422, 502)  # a model is looked up, fetched and read

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/admin/v1/deployments",
        list_deployments,
        "The deployments: what shall run, and what does.",
        answer=DeploymentList,
        statuses=_READ,
    ),
    Operation(
        "POST",
        "/admin/v1/deployments",
        deploy,
        "Make a deployment, or change it to this; another model rolls out.",
        answer=DeploymentView,
        document=DeploymentSpec,
        statuses=_RESOLVE,
    ),
    Operation(
        "GET",
        "/admin/v1/deployments/{id}",
        show_deployment,
        "One deployment, by its name.",
        answer=DeploymentView,
        statuses=_READ,
    ),
    Operation(
        "DELETE",
        "/admin/v1/deployments/{id}",
        delete_deployment,
        "End a deployment; what it is answering is finished within its grace.",
        answer=DeletedDeployment,
        statuses=_CHANGE,
    ),
    Operation(
        "POST",
        "/admin/v1/deployments/{id}/scale",
        scale_deployment,
        "Change how many replicas there may be.",
        answer=DeploymentView,
        document=ScaleBody,
        statuses=_CHANGE,
    ),
    Operation(
        "POST",
        "/admin/v1/deployments/{id}/stop",
        _step("stop_deployment", "stopped", lambda fleet, name: fleet.stop(name)),
        "No replicas until it is started or deployed again.",
        answer=DeploymentView,
        document=NoFields,
        statuses=_CHANGE,
    ),
    Operation(
        "POST",
        "/admin/v1/deployments/{id}/start",
        _step("start_deployment", "started", lambda fleet, name: fleet.start(name)),
        "End a stop.",
        answer=DeploymentView,
        document=NoFields,
        statuses=_CHANGE,
    ),
    Operation(
        "POST",
        "/admin/v1/deployments/{id}/restart",
        restart_deployment,
        "Replace every replica, one after another, with changed engine options.",
        answer=RolloutView,
        document=RestartBody,
        statuses=_CHANGE,
    ),
    Operation(
        "GET",
        "/admin/v1/replicas",
        list_replicas,
        "The replica processes.",
        answer=ReplicaList,
        parameters=(_DEPLOYMENT,),
        statuses=_READ,
    ),
    Operation(
        "GET",
        "/admin/v1/rollouts",
        list_rollouts,
        "The rollouts that run, and the last of each deployment.",
        answer=RolloutList,
        statuses=_READ,
    ),
    Operation(
        "GET",
        "/admin/v1/rollouts/{id}",
        show_rollout,
        "A deployment's rollout: the running one, or the last.",
        answer=RolloutView,
        statuses=_READ,
    ),
    Operation(
        "POST",
        "/admin/v1/rollouts/{id}",
        start_rollout,
        "Roll out what a model reference means now.",
        answer=RolloutView,
        document=RolloutBody,
        statuses=_RESOLVE,
    ),
    *(
        Operation(
            "POST",
            f"/admin/v1/rollouts/{{id}}/{verb}",
            _step(f"{verb}_rollout", done, act),
            summary,
            answer=RolloutView,
            document=NoFields,
            statuses=_CHANGE,
        )
        for verb, done, act, summary in (
            ("pause", "rollout paused", lambda fleet, name: fleet.pause(name), "Stay at the present step."),
            ("resume", "rollout resumed", lambda fleet, name: fleet.resume(name), "End a pause."),
            (
                "promote",
                "rollout promoted",
                lambda fleet, name: fleet.promote(name),
                "Go on at once to the new version, whatever is left to be judged.",
            ),
            (
                "undo",
                "rollout undone",
                lambda fleet, name: fleet.undo(name),
                "Go back to the version before, also after the end.",
            ),
        )
    ),
)
