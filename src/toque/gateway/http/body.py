"""Reading a request's body within bounds, and turning it into a type."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, TypeVar

import msgspec

from toque.errors import PayloadTooLargeError, RequestError
from toque.gateway.http.errors import BODY_TIMEOUT

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection while its request was still being read or answered."""


async def read_body(scope: MutableMapping[str, Any], receive: Any, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. PayloadTooLargeError past ``max_bytes``, RequestError when it does not arrive in time."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes, f"{length[:20].decode()} bytes")
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"content-encoding {encoding[:20]!r} is not supported: send the JSON as it is",
            code="unsupported_encoding",
        )
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes, "more")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {timeout_s:g} s ({size} bytes came)", code=BODY_TIMEOUT
        ) from None


def check_content_type(scope: MutableMapping[str, Any]) -> None:
    """JSON only. Besides being what the body is, it keeps a browser's form posts from reaching a local server."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
            if kind == "application/json" or kind.endswith("+json"):
                return
            raise RequestError(
                f"content-type must be application/json, got {kind[:60]!r}", code="unsupported_content_type"
            )
    raise RequestError(
        "content-type must be application/json, and none was given", code="unsupported_content_type"
    )


def decode(body: bytes, kind: type[T]) -> T:
    """The body as ``kind``, strictly. RequestError names the field that does not fit; no value is quoted."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise RequestError(
            "the body starts with a byte order mark: send plain UTF-8 JSON", code="invalid_json"
        )
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8 (byte {error.start} is 0x{body[error.start]:02x})",
            code="invalid_json",
        ) from None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except RecursionError:
        raise RequestError("the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        reason = "it is empty" if not body.strip() else str(error).removeprefix("JSON is malformed: ")[:120]
        raise RequestError(f"the body is not valid JSON: {reason}", code="invalid_json") from None


def _field_error(text: str) -> RequestError:
    """msgspec's "Expected `int`, got `str` - at `$.a[0].b`" as a sentence with the field first."""
    reason, _, where = text.partition(" - at ")
    path = where.rpartition("`$")[2].strip("`").lstrip(".") if where else ""
    if "missing required field" in reason:
        name = reason.rpartition("field `")[2].rstrip("`")
        path = f"{path}.{name}" if path else name
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    path = path.replace("[...]", "")
    reason = reason.replace("`", "").replace("Expected ", "expected ")
    if not path:
        return RequestError(f"the body must be a JSON object: {reason}", code="invalid_type")
    return RequestError(f"{path}: {reason}", param=path, code="invalid_type")


def _too_large(max_bytes: int, got: str) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body may have at most {max_bytes} bytes, got {got}")
