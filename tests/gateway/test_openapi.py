"""/openapi.json: valid, complete, and true of what the gateway answers."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from toque.errors import ModelNotFoundError, QueueFullError, ReplicaDiedError, UnavailableError
from toque.fleet.admin import FleetAdmin
from toque.fleet.store import MemoryFleetStore, Revision
from toque.gateway.http import answers, embedding_types
from toque.gateway.http.fields import nested
from toque.gateway.http.openapi import document
from toque.gateway.http.operations import Operation
from toque.gateway.http.reference import OPERATIONS
from toque.registry.reader import RegistryReader
from toque.registry.settings import RegistrySettings
from toque.routing.base import ReplicaState

from .world import Plan, World, build, events, spoken, world

load_all_checks()
HELD = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
APP = build(Plan(script=spoken("ok")))[3]


async def _resolve(reference: str) -> Revision:
    if len(reference) > 6:
        raise ModelNotFoundError("there is no such model", param="model")
    return Revision("", reference, f"/models/{reference}", reference, reference)


APP.state.gateway.fleet = FleetAdmin(MemoryFleetStore(), _resolve, lambda: None)
HOME = TemporaryDirectory(prefix="toque-")
APP.state.gateway.registry = RegistryReader(RegistrySettings(f"sqlite:///{HOME.name}/r.db"), Path(HOME.name))
SCHEMA: Any = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"host": "127.0.0.1"})


# Warnings are those of the client that schemathesis drives the application with.
@pytest.mark.filterwarnings("ignore")
@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_requests_get_documented_answers(case: Any) -> None:
    """Schemathesis: no 5xx, only documented statuses, bodies as their schemas say."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "parrot"  # nothing else is known: what comes after the name is to be tried
    if "/admin/v1/" in case.path and "{id}" in case.path and case.path_parameters["id"][:1] < "t":
        case.path_parameters["id"] = "chat"  # as the deployments, which others of these requests make
    if isinstance(case.body, dict) and "name" in case.body:
        case.body["name"] = "chat"
    if "X-Request-Timeout" in (case.headers or {}):
        case.headers["X-Request-Timeout"] = "60"  # a deadline within the moment ends in 504, as was asked
    answer = case.call(headers={"host": "127.0.0.1"})
    case.validate_response(answer, checks=[CHECKS.get_one(name) for name in HELD])


async def test_the_document_names_every_route(parrot: World) -> None:
    answer = await parrot.client.get("/openapi.json")
    found = answer.json()
    assert found["openapi"] == "3.1.0"
    routes = {(m, r.path.replace(":path", "")) for r in parrot.app.routes for m in r.methods - {"HEAD"}}
    assert {(m.upper(), path) for path, item in found["paths"].items() for m in item} == routes
    assert len({o["operationId"] for item in found["paths"].values() for o in item.values()}) == len(routes)
    text = answer.text
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in found["components"]["schemas"]


class Document(msgspec.Struct):
    """Named like a type of the API."""

    pages: int


def test_two_types_of_one_name_are_told_apart() -> None:
    async def handler(exchange: Any, gateway: Any) -> None: ...

    ours = Operation("GET", "/a", handler, "", answer=Document)
    theirs = Operation("GET", "/b", handler, "", answer=embedding_types.Document)
    found = document([ours, theirs])
    for path, field in (("/a", "pages"), ("/b", "text")):
        schema = found["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert list(found["components"]["schemas"][name]["properties"]) == [field]


async def test_the_page_holds_everything_itself(parrot: World) -> None:
    answer = await parrot.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"<script|(?:src|href)=['\"]?https?:", answer.text)
    for operation in OPERATIONS:
        assert operation.pattern in answer.text
        for kind in () if operation.body is None else nested(operation.body):
            assert f"<h2 id={kind.__name__}>" in answer.text
            assert f"<a href='#{kind.__name__}'>" in answer.text
    assert "models here continue text, they do not fill in" in answer.text


def same_shape(kind: type[Any], value: Any, where: str = "") -> None:
    """Every field of a real answer is in its type: the schema leaves nothing out."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    assert set(value) <= set(known), (where, set(value) - set(known))
    msgspec.convert(value, kind, strict=True)
    for name, item in value.items():
        for option in (known[name], *getattr(known[name], "__args__", ())):
            for inner in (option, *getattr(option, "__args__", ())):
                if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                    for part in item if isinstance(item, list) else [item]:
                        if isinstance(part, dict):
                            same_shape(inner, part, f"{where}.{name}")


async def test_answers_are_as_their_types_say(parrot: World) -> None:
    rich: dict[str, Any] = {"n": 2, "stream_options": {"include_usage": True}, "stream": True}
    same_shape(answers.ChatCompletion, (await parrot.chat(logprobs=True, top_logprobs=2)).json())
    same_shape(answers.ChatCompletion, (await parrot.chat()).json())
    same_shape(answers.Completion, (await parrot.complete(logprobs=2, echo=True)).json())
    for event in events(await parrot.chat(**rich, logprobs=True))[:-1]:
        same_shape(answers.ChatCompletionChunk, event)
    for event in events(await parrot.complete(**rich, logprobs=1))[:-1]:
        same_shape(answers.Completion, event)
    same_shape(answers.ModelList, (await parrot.client.get("/v1/models")).json())
    same_shape(answers.Health, (await parrot.client.get("/health")).json())
    same_shape(answers.ErrorAnswer, (await parrot.chat(temperature=9)).json())


def _operation(path: str) -> Operation:
    return next(operation for operation in OPERATIONS if operation.path == path)


async def _has(answer: httpx.Response, path: str, status: int) -> None:
    assert answer.status_code == status
    assert status in (*_operation(path).statuses, 401, 403)


async def test_failures_of_engines_and_limits_have_documented_statuses() -> None:
    path = "/v1/completions"
    async with world() as w:
        for error in (QueueFullError("full"), UnavailableError("gone"), ReplicaDiedError("died")):
            w.engine.script = spoken("ab", error=error)
            await _has(await w.complete(), path, error.status)
        w.engine.script = spoken("ab", first_delay_s=5)
        await _has(await w.complete(timeout=0.01), path, 504)
        w.engine.state = ReplicaState.DEAD
        await _has(await w.client.get("/ready"), "/ready", 503)
        await _has(await w.client.get("/health"), "/health", 503)
        await _has(await w.client.get("/v1/models/parrot"), "/v1/models/{id:path}", 503)
    async with world(Plan(flags={"limits.max_body_bytes": 10})) as w:
        await _has(await w.complete(), path, 413)


async def test_the_document_names_what_may_be_asked_beside_a_body(parrot: World) -> None:
    found = (await parrot.client.get("/openapi.json")).json()["paths"]

    def names(method: str, path: str, place: str) -> set[str]:
        parameters = found[path][method].get("parameters", [])
        return {parameter["name"].lower() for parameter in parameters if parameter["in"] == place}

    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"):
        assert names("post", path, "header") == {"x-request-timeout", "idempotency-key", "traceparent"}
    assert names("get", "/admin/v1/usage", "query") == {
        *("group_by", "since", "until", "month", "format"),
        *("model", "version", "tenant", "key", "endpoint"),
    }
    assert names("get", "/admin/v1/versions", "query") == {"model", "all"}
    assert names("get", "/admin/v1/aliases", "query") == {"model"}
    assert names("get", "/admin/v1/replicas", "query") == {"deployment"}
    content = found["/admin/v1/usage"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/csv"}


@pytest.mark.parametrize(
    ("query", "param"),
    [("x=1", "x"), ("deployment=a&deployment=b", "deployment"), ("&".join(["a"] * 33), None)],
)
async def test_a_query_that_is_not_known_is_refused(query: str, param: str | None) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://127.0.0.1") as client:
        answer = await client.get(f"/admin/v1/replicas?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
