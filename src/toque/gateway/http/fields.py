"""How a request's field is handled, declared where the field is: in the annotation of its msgspec type.

::

    temperature: Annotated[float | None, honoured("0 is greedy; up to 2.")] = None
    suffix: Annotated[str | None, refused("models here continue text, they do not fill in")] = None
    store: Annotated[Raw, ignored("nothing is stored")] = OPTIONAL

The declaration is read three ways: requests are refused by it, docs/api.md prints it, /openapi.json describes it.
A field that no type names is ignored, as OpenAI's clients expect of a compatible server.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from msgspec import Meta, Raw, Struct, field

from toque.errors import RequestError

NOT_GIVEN = Raw(b"null")
# The default of fields of type Raw: NOT_GIVEN itself could not be written into a schema.
OPTIONAL: Any = field(default_factory=lambda: NOT_GIVEN)
_NOTHING = frozenset({b"null", b"false", b"[]", b"{}", b'""', b'"none"', b'"auto"'})


class Handling(StrEnum):
    HONOURED = "honoured"  # it does what OpenAI's reference, or the text beside it, says
    REFUSED = "refused"  # 400 naming it, unless it asks for nothing (null, false, empty, none, auto)
    IGNORED = "ignored"  # any value is taken, and changes nothing


@dataclass(frozen=True, slots=True)
class FieldHandling:
    name: str
    type: Any
    handling: Handling
    text: str


def honoured(text: str = "") -> Meta:
    return _declare(Handling.HONOURED, text)


def refused(text: str) -> Meta:
    return _declare(Handling.REFUSED, text)


def ignored(text: str) -> Meta:
    return _declare(Handling.IGNORED, text)


def _declare(handling: Handling, text: str) -> Meta:
    schema: dict[str, Any] = {"x-toque-handling": handling.value}
    if text:
        schema["description"] = text
    return Meta(extra={"handling": handling, "text": text}, extra_json_schema=schema)


@cache
def declared(body: type[Struct]) -> tuple[FieldHandling, ...]:
    """The fields of a body in their order. A field without a declaration is a TypeError: none may be forgotten."""
    fields: list[FieldHandling] = []
    for name, hint in get_type_hints(body, include_extras=True).items():
        extras = [m.extra for m in get_args(hint)[1:] if isinstance(m, Meta) and m.extra is not None]
        if get_origin(hint) is not Annotated or not extras:
            raise TypeError(f"{body.__name__}.{name} does not say whether it is honoured, refused or ignored")
        fields.append(FieldHandling(name, get_args(hint)[0], extras[0]["handling"], extras[0]["text"]))
    return tuple(fields)


def nested(body: type[Struct]) -> tuple[type[Struct], ...]:
    """The types inside a body, at any depth, in the order in which its fields name them."""
    found: dict[type[Struct], None] = {}

    def look(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, Struct) and hint not in found:
            found[hint] = None
            for inner in declared(hint):
                look(inner.type)
        for part in get_args(hint):
            look(part)

    for outer in declared(body):
        look(outer.type)
    return tuple(found)


def type_name(hint: Any) -> str:
    """A field's type for people: ``float | None`` is a number."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is UnionType:
        return " or ".join(type_name(option) for option in options)
    if get_origin(hint) is list:
        return f"list of {type_name(options[0])}"
    if get_origin(hint) is dict:
        return "object"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", Raw: "any"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))


@cache
def _refusals(body: type[Struct]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (field.name, field.text)
        for field in declared(body)
        if field.handling is Handling.REFUSED and field.type is Raw
    )


def refuse_declared(body: Struct, where: str = "") -> None:
    """RequestError when a refused field asks for something. Those with a type of their own are checked apart."""
    for name, text in _refusals(type(body)):
        value = getattr(body, name)
        if value is not NOT_GIVEN and bytes(value) not in _NOTHING:
            raise RequestError(f"{where}{name} is not supported: {text}", param=f"{where}{name}")


def given(value: Raw) -> bool:
    return value is not NOT_GIVEN and bytes(value) != b"null"
