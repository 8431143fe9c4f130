"""OpenAPI 3.1 from the table of operations and the types in use."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from toque import __version__
from toque.gateway.http.answers import ErrorAnswer
from toque.gateway.http.operations import Operation

_REF = "#/components/schemas/{name}"
_Refs = dict[type[msgspec.Struct], dict[str, Any]]
_EVERYWHERE = (403, 500)  # a host name that is not ours; a mistake of ours


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    types: list[type[msgspec.Struct]] = [
        kind
        for operation in operations
        for kind in (operation.body, operation.document, operation.answer, operation.events)
        if kind is not None
    ]
    types.append(ErrorAnswer)
    unique = tuple(dict.fromkeys(types))
    # The library names two types of one name by their modules, too: so its references are used, not the types' names.
    refs, schemas = msgspec.json.schema_components(unique, ref_template=_REF)
    ref: _Refs = dict(zip(unique, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.pattern, {})[operation.method.lower()] = _operation(operation, ref)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Toque",
            "version": __version__,
            "description": "Language models over the OpenAI API. Fields that are not named here are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, ref: _Refs) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": getattr(operation.handler, "__name__", operation.pattern),
        "summary": operation.summary,
        "responses": _responses(operation, ref),
    }
    if operation.needs_key:
        found["security"] = [{"key": []}]
    if "{id}" in operation.pattern:
        found["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    for parameter in operation.parameters:
        found.setdefault("parameters", []).append(
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": False,
                "description": parameter.text,
                "schema": parameter.schema,
            }
        )
    body = operation.body or operation.document
    if body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref[body]}},
        }
    return found


def _responses(operation: Operation, ref: _Refs) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[operation.content_type] = {"schema": ref[operation.answer]}
    else:
        content[operation.content_type] = {"schema": {"type": "string"}}
    content |= {kind: {"schema": {"type": "string"}} for kind in operation.other_content}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _event(operation.events, ref)}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    statuses = {*operation.statuses, *_EVERYWHERE, *((401,) if operation.needs_key else ())}
    for status in sorted(statuses):
        if status == 503 and not operation.needs_key:  # health says why in its own words
            responses["503"] = {"description": HTTPStatus(503).phrase, "content": content}
            continue
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": ref[ErrorAnswer]}},
        }
    return responses


def _event(data: type[msgspec.Struct], ref: _Refs) -> dict[str, Any]:
    """One server-sent event: a chunk, the error that broke the stream, or ``[DONE]`` at its good end."""
    chunk, error = (
        {"type": "string", "contentMediaType": "application/json", "contentSchema": ref[kind]}
        for kind in (data, ErrorAnswer)
    )
    choices = {"anyOf": [chunk, error, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": choices}, "required": ["data"]}
