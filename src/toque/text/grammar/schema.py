"""JSON schemas as this server takes them: every keyword is enforced, a mere annotation, or refused by name.

The table below decides, not the grammar library: what it would overlook is refused here. What comes out of
`checked_schema` holds enforced keywords only, so nothing in a caller's schema reaches the library's own options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from toque.errors import RequestError
from toque.text.grammar.formats import LIBRARY_FORMATS, NUMBER_FORMATS, OWN_FORMATS

MAX_DEPTH = 48
MAX_NODES = 4_000  # subschemas
MAX_PROPERTIES = 300  # of one object: the time of a mask grows with the square of the optional ones
MAX_ENUM = 2_000  # values, over the whole schema
MAX_COUNT = 100_000  # minLength, maxItems …
_MAX_PATTERN = 4_096
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

# Say nothing about what is valid: left out.
ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema discriminator"
    " contentMediaType contentEncoding contentSchema".split()
)
_ONE = frozenset({"items", "additionalProperties", "additionalItems"})  # keywords that hold a schema
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ENFORCED = _ONE | _LIST | _MAP | _COUNTS | _BOUNDS | {"$ref", "$anchor", "const", "enum", "type"}
ENFORCED |= {"required", "pattern", "format"}


def checked_schema(schema: Any, *, param: str = "response_format") -> dict[str, Any]:
    """A copy that holds enforced keywords only. Raises RequestError naming the keyword and its path otherwise."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}: the schema must be an object, got {_named(schema)}", param=param)
    checked: dict[str, Any] = _Checker(param, schema).schema(schema, "#", 0)
    return checked


class _Checker:
    def __init__(self, param: str, root: Mapping[str, Any]) -> None:
        self._param = param
        self._root = root
        self._nodes = self._enums = 0

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise self._error(path, f"the schema is nested deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            raise self._error(path, f"the schema holds more than {MAX_NODES} subschemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(path, f"a schema must be an object or a boolean, got {_named(schema)}")
        checked: dict[str, Any] = {}
        for keyword, value in schema.items():
            where = f"{path}/{_escaped(keyword)}"
            if (
                keyword in ANNOTATIONS
                or keyword.startswith("x-")
                or (keyword in ("$id", "id") and path == "#")
            ):
                continue
            checked[keyword] = self._keyword(keyword, value, where, depth)
        self._format(checked, f"{path}/format")
        self._counts(checked, path)
        return checked

    def _keyword(self, keyword: str, value: Any, where: str, depth: int) -> Any:
        if keyword in _ONE:
            if keyword == "items" and isinstance(value, list):
                return [self.schema(entry, f"{where}/{i}", depth + 1) for i, entry in enumerate(value)]
            return self.schema(value, where, depth + 1)
        if keyword in _LIST:
            if not isinstance(value, list) or not value:
                raise self._error(where, f"must be a list of schemas, got {_named(value)}")
            return [self.schema(entry, f"{where}/{i}", depth + 1) for i, entry in enumerate(value)]
        if keyword in _MAP:
            return self._map(keyword, value, where, depth)
        if keyword in _COUNTS:
            return self._count(value, where)
        if keyword in _BOUNDS:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self._error(where, f"must be a number, got {_named(value)}")
            if abs(value) > 2**53 or (keyword == "multipleOf" and value <= 0):
                raise self._error(where, f"the number {value} is out of range")
            return value
        checker = _SCALARS.get(keyword)
        if checker is None:
            raise self._error(where, "this keyword is not supported, so it could not be enforced")
        return checker(self, value, where)

    def _map(self, keyword: str, value: Any, where: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(where, f"must be an object of schemas, got {_named(value)}")
        if keyword in ("properties", "patternProperties") and len(value) > MAX_PROPERTIES:
            raise self._error(where, f"holds {len(value)} properties, at most {MAX_PROPERTIES} are supported")
        if keyword == "patternProperties":
            for pattern in value:
                self._pattern(pattern, where)
        return {
            name: self.schema(entry, f"{where}/{_escaped(name)}", depth + 1) for name, entry in value.items()
        }

    def _count(self, value: Any, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise self._error(where, f"must be an integer from 0 to {MAX_COUNT}, got {_named(value)}")
        return int(value)

    def _type(self, value: Any, where: str) -> Any:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise self._error(where, f"must be among {', '.join(sorted(_TYPES))}, got {_named(name)}")
        if not names:
            raise self._error(where, "must name a type")
        return value

    def _required(self, value: Any, where: str) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(where, f"must be a list of names, got {_named(value)}")
        if len(value) > MAX_PROPERTIES:
            raise self._error(where, f"holds {len(value)} names, at most {MAX_PROPERTIES} are supported")
        return list(dict.fromkeys(value))

    def _enum(self, value: Any, where: str) -> Any:
        if not isinstance(value, list) or not value:
            raise self._error(where, f"must be a list of values, got {_named(value)}")
        self._enums += len(value)
        if self._enums > MAX_ENUM:
            raise self._error(where, f"the schema holds more than {MAX_ENUM} enum values")
        for entry in value:
            self._const(entry, where)
        return value

    def _const(self, value: Any, where: str) -> Any:
        if _too_deep(value, MAX_DEPTH):
            raise self._error(where, f"the value is nested deeper than {MAX_DEPTH} levels")
        return value

    def _pattern(self, value: Any, where: str) -> Any:
        if not isinstance(value, str) or len(value) > _MAX_PATTERN:
            raise self._error(where, f"must be a regular expression of at most {_MAX_PATTERN} characters")
        # A look-around or a back reference would be an error of the library too; this one names the path.
        if re.search(r"(?<!\\)\(\?(=|!|<=|<!)", value) or re.search(r"(?<!\\)(\\\\)*\\[1-9]", value):
            raise self._error(where, "look-around and back references are not supported")
        return value

    def _string(self, value: Any, where: str) -> Any:
        if not isinstance(value, str):
            raise self._error(where, f"must be a string, got {_named(value)}")
        return value

    def _ref(self, value: Any, where: str) -> Any:
        if not isinstance(value, str) or not value.startswith("#"):
            raise self._error(
                where, f"only references into the schema itself (#…) are supported, got {_named(value)}"
            )
        seen = {value}
        target = self._target(value, where)
        while isinstance(target, Mapping) and isinstance(target.get("$ref"), str):
            following = target["$ref"]
            if following in seen:
                raise self._error(where, f"{_named(value)} leads back to itself, so nothing can match it")
            seen.add(following)
            target = self._target(following, where)
        return value

    def _target(self, pointer: str, where: str) -> Any:
        """What a reference points to; None where only the library can tell (anchors, percent-encoding)."""
        if pointer != "#" and (not pointer.startswith("#/") or "%" in pointer):
            return None
        target: Any = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, Mapping) and name in target:
                target = target[name]
            else:
                raise self._error(where, f"{_named(pointer)} points to nothing")
        return target

    def _format(self, checked: dict[str, Any], where: str) -> None:
        name = checked.get("format")
        if name is None or name in LIBRARY_FORMATS:
            return
        if name in NUMBER_FORMATS:
            extra: dict[str, Any] = dict(NUMBER_FORMATS[name])
        elif name in OWN_FORMATS:
            extra = {"pattern": OWN_FORMATS[name]}
        else:
            known = ", ".join(sorted({*OWN_FORMATS, *LIBRARY_FORMATS, *NUMBER_FORMATS}))
            raise self._error(where, f"the format {_named(name)} is not supported; known: {known}")
        del checked["format"]
        if extra.keys() & checked.keys():
            checked["allOf"] = [*checked.get("allOf", ()), extra]
        else:
            checked |= extra

    def _counts(self, checked: dict[str, Any], path: str) -> None:
        """Keys beyond ``properties`` may come twice, of which a parser keeps one: their count is no promise."""
        least = checked.get("minProperties", 0)
        if least > max(1, len(checked.get("required", ()))):
            raise self._error(
                f"{path}/minProperties", "can only be enforced up to the number of required properties (or 1)"
            )

    def _error(self, path: str, why: str) -> RequestError:
        keyword = path.rsplit("/", 1)[-1]
        shown = path if len(path) <= 200 else "…" + path[-200:]
        return RequestError(
            f"{self._param}: {keyword} at {shown}: {why}", param=self._param, code="unsupported_schema"
        )


_SCALARS: dict[str, Callable[[_Checker, Any, str], Any]] = {
    "type": _Checker._type,
    "required": _Checker._required,
    "enum": _Checker._enum,
    "const": _Checker._const,
    "pattern": _Checker._pattern,
    "format": _Checker._string,
    "$ref": _Checker._ref,
    "$anchor": _Checker._string,
}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:64]


def _named(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _too_deep(value: Any, room: int) -> bool:
    if isinstance(value, list | Mapping):
        entries = value if isinstance(value, list) else value.values()
        return room == 0 or any(_too_deep(entry, room - 1) for entry in entries)
    return False
