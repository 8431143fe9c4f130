"""What may be asked beside a body: the query's parameters and the headers, as handlers read and documents show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from toque.errors import RequestError
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.translate import MAX_TIMEOUT_S

_MOST = 32
_TEXT: Mapping[str, object] = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """None of them is required. ``schema`` is the value's JSON schema."""

    name: str
    text: str
    schema: Mapping[str, object] = field(default_factory=lambda: _TEXT)
    place: str = "query"


REQUEST_TIMEOUT = Parameter(
    "X-Request-Timeout",
    "Seconds until the request ends in 504; the body's `timeout` where that is shorter.",
    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
    "header",
)
IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key",
    "The same key with the same body gets the first answer again.",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    "header",
)
TRACEPARENT = Parameter(
    "traceparent",
    "The caller's W3C trace, which the request's spans and logs join; one that is none is ignored.",
    {"type": "string", "pattern": "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"},
    "header",
)


def read_query(exchange: Exchange, known: Sequence[Parameter] = ()) -> dict[str, str]:
    """The query's parameters by name. RequestError for one that is not known, one given twice, or too many."""
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST)
    except ValueError:
        raise RequestError(f"the query has more than {_MOST} parameters") from None
    asked: dict[str, str] = {}
    names = [parameter.name for parameter in known]
    for name, value in pairs:
        if name not in names:
            listed = ", ".join(sorted(names)) or "none"
            raise RequestError(f"unknown parameter {name[:40]!r}; known: {listed}", param=name[:40])
        if name in asked:
            raise RequestError(f"the parameter {name} was given twice", param=name)
        asked[name] = value
    return asked
