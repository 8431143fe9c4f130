"""What a function's schema says about the kinds of its parameters, for dialects that write values as bare text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 16
_TEXT = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}


class ParameterTypes:
    """The kinds of a function's parameters, from its JSON schema (of type object)."""

    def __init__(self, schema: Any) -> None:
        self._schema: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._known: dict[str, frozenset[str] | None] = {}
        self._referred: dict[str, frozenset[str] | None] = {}  # each reference is followed once

    def only_text(self, name: str) -> bool:
        """The value is text, whatever it looks like."""
        return self.kinds(name) == _TEXT

    def as_json(self, name: str, value: str) -> str:
        """The value as JSON: what it says where its kind allows that, else a text."""
        kinds = self.kinds(name)
        plain = value.strip()
        plain = _WORDS.get(plain, plain)
        kind = "string" if kinds == _TEXT else _kind(plain)
        if kind != "string" and (kinds is None or kind in kinds):
            return plain
        return json.dumps(value, ensure_ascii=False)

    def kinds(self, name: str) -> frozenset[str] | None:
        """The kinds of JSON that a parameter may be, integers and numbers always together; None: any."""
        if name not in self._known:
            properties = self._schema.get("properties")
            schema = properties.get(name) if isinstance(properties, Mapping) else None
            self._known[name] = self._kinds(schema, 0)
        return self._known[name]

    def _kinds(self, schema: Any, depth: int) -> frozenset[str] | None:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._referred:
                self._referred[reference] = None  # what leads back to itself may be anything
                self._referred[reference] = self._kinds(self.at(reference), depth + 1)
            return self._referred[reference]
        named = schema.get("type")
        if isinstance(named, str | list):
            names = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
            return frozenset({*names, *({"number", "integer"} if names & {"number", "integer"} else ())})
        if isinstance(values := schema.get("enum"), list):
            return frozenset(kind for value in values for kind in _kinds_of(value))
        if "const" in schema:
            return _kinds_of(schema["const"])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(members := schema.get(keyword), list):
                found = [self._kinds(member, depth + 1) for member in members]
                return None if None in found else frozenset().union(*(kinds for kinds in found if kinds))
        if isinstance(members := schema.get("allOf"), list):
            return next((kinds for m in members if (kinds := self._kinds(m, depth + 1)) is not None), None)
        return None

    def at(self, reference: str) -> Any:
        """What a ``#/…`` points to in the schema; None for nothing."""
        found: Any = self._schema
        for part in reference.removeprefix("#").split("/")[1:]:
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        return found


def _kind(text: str) -> str:
    """The kind of JSON that a text is; string for what is none, and for what is JSON of a string."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "string"
    return next(iter(_kinds_of(value)))


def _kinds_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float):
        return frozenset({"number", "integer"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
