"""``/openapi.json`` and ``/docs``: the interface as it is served, for programs and for people."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache

import msgspec

from toque import __version__
from toque.gateway.gateway import Gateway
from toque.gateway.http.admin_fleet import OPERATIONS as FLEET
from toque.gateway.http.admin_models import OPERATIONS as MODELS
from toque.gateway.http.admin_usage import OPERATIONS as ADMIN
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.fields import declared, nested, type_name
from toque.gateway.http.openapi import document
from toque.gateway.http.operations import OPERATIONS as ANSWERING
from toque.gateway.http.operations import Operation

_HTML = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
]
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
code{font:13px ui-monospace,monospace}h2 code{font-size:17px}
h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0}
tr{border-bottom:1px solid #eee}.refused{color:#a22}.ignored{color:#777}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8bf}tr{border-color:#333}.refused{color:#f88}}
"""


async def openapi(exchange: Exchange, gateway: Gateway) -> None:
    await exchange.answer(200, _document())


async def page(exchange: Exchange, gateway: Gateway) -> None:
    await exchange.answer(200, _page(), list(_HTML))


OPERATIONS: tuple[Operation, ...] = (
    *ANSWERING,
    *ADMIN,
    *FLEET,
    *MODELS,
    Operation("GET", "/openapi.json", openapi, "This interface as OpenAPI 3.1.", needs_key=False),
    Operation("GET", "/docs", page, "This interface for people.", content_type="text/html", needs_key=False),
)


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(OPERATIONS))


@cache
def _page() -> bytes:
    """One page without scripts and without anything from elsewhere."""
    title = f"Toque {html.escape(__version__)}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
        "<p>Language models over the OpenAI API. For programs: <a href='/openapi.json'>openapi.json</a>. "
        "Requests carry <code>Authorization: Bearer KEY</code> where the server has keys. "
        "Fields that are not named here are ignored.</p>",
    ]
    parts += [_section(operation) for operation in OPERATIONS]
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    parts += [_type(kind) for kind in dict.fromkeys(kind for body in bodies for kind in nested(body))]
    return "".join(parts).encode()


def _section(operation: Operation) -> str:
    key = "" if operation.needs_key else " Needs no key."
    parts = [
        f"<h2><code>{operation.method} {html.escape(operation.pattern)}</code></h2>",
        f"<p>{html.escape(operation.summary)}{key}</p>",
    ]
    if operation.parameters:
        parts.append("<table><tr><th>Parameter<th>In<th></tr>")
        for parameter in operation.parameters:
            parts.append(
                f"<tr><td><code>{parameter.name}</code><td>{parameter.place}<td>{_prose(parameter.text)}</tr>"
            )
        parts.append("</table>")
    if operation.body is not None:
        parts.append(_fields(operation.body))
    if operation.document is not None:
        names = ", ".join(f"<code>{name}</code>" for name in operation.document.__struct_fields__)
        parts.append(f"<p>Fields, and no others: {names or 'none, an empty object'}.</p>")
    return "".join(parts)


def _type(kind: type[msgspec.Struct]) -> str:
    """A type that fields of bodies have."""
    return f"<h2 id={kind.__name__}><code>{kind.__name__}</code></h2>{_fields(kind)}"


def _fields(kind: type[msgspec.Struct]) -> str:
    parts = ["<table><tr><th>Field<th>Type<th>Handling<th></tr>"]
    names = {inner.__name__ for inner in nested(kind)}
    for field in declared(kind):
        words = html.escape(type_name(field.type)).split()
        shown = " ".join(f"<a href='#{word}'>{word}</a>" if word in names else word for word in words)
        parts.append(
            f"<tr><td><code>{field.name}</code><td>{shown}"
            f"<td class={field.handling}>{field.handling}<td>{_prose(field.text)}</tr>"
        )
    return "".join([*parts, "</table>"])


def _prose(text: str) -> str:
    """What stands between backticks, as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def open_paths(operations: Sequence[Operation]) -> frozenset[str]:
    return frozenset(operation.path for operation in operations if not operation.needs_key)
