"""Errors as OpenAI clients read them: one shape, small, whatever happened."""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException

from toque.errors import (
    DeadlineError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    RequestError,
    ToqueError,
)

MAX_MESSAGE = 1_000
BODY_TIMEOUT = "body_timeout"


def error_object(error: ToqueError) -> dict[str, object]:
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[: MAX_MESSAGE - 3] + "..."
    # What a message quotes came from outside: a lone surrogate in it must not break the answer.
    message = message.encode("utf-8", "replace").decode()
    return {
        "error": {
            "message": message,
            "type": type(error).type,
            "param": error.param,
            "code": error.error_code,
        }
    }


def error_body(error: ToqueError) -> bytes:
    return msgspec.json.encode(error_object(error))


def error_headers(error: ToqueError) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, OverloadedError):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, DeadlineError):
        # The official clients send a 5xx again by themselves: the work would be done, and thrown away, three times.
        headers.append((b"x-should-retry", b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413 or error.error_code == BODY_TIMEOUT:
        # The rest of the body is not read, so nothing else can be said on this connection.
        headers.append((b"connection", b"close"))
    return headers


def from_http_exception(error: HTTPException) -> ToqueError:
    """What the router raises for a path or a method that does not exist."""
    if error.status_code == 404:
        return NotFoundError("there is nothing at this path; /openapi.json and the README list what there is")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowedError(f"this path does not take this method; it takes {allowed}")
    return RequestError(str(error.detail))
