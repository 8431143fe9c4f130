"""Calls as Qwen 3 Coder writes them, ``<function=name>``, as rules of a Lark grammar.

Values are bare text, so two things must agree: what the grammar lets a model write, and what the parser makes of it.
A value is written here in one of three ways, by the kinds that its schema allows (`ParameterTypes`, as in the parser):

- no text among them: JSON of the schema, which nothing but JSON can be;
- text only, or texts and plain kinds beside each other: one lexeme, of everything that is read as a valid value;
- anything else: `NotWritable`, and the whole call is enforced in another dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toque.text.tools.parameter_types import ParameterTypes

_MAX_PARAMETERS = 256
_NAME = re.compile(r'[^<>\s"]{1,256}')
_END = '"\\n</parameter>\\n"'
_LEFT = 2_000  # steps into alternatives of a function's parameters: references multiply them
_ROOM = 1 << 18  # characters of schemas in a grammar, with the definitions that each parameter brings along


def _free() -> str:
    """Any text that does not end the parameter: after each ``<`` comes something else than the rest of the tag.

    Said positively: as a complement, an intersection with a bounded length has too many states for the lexer.
    """
    rest = "/parameter>"
    escaped = [character.replace("/", r"\/") for character in rest]
    others = ("".join(escaped[:i]) + f"(?:[^<{escaped[i]}][^<]*)?" for i in range(len(rest)))
    return f"/[^<]*(?:<(?:{'|'.join(others)}))*/"


_FREE = _free()
_BLANK = r"[\s\x1c-\x1f]*"  # what str.strip takes off
# Texts that the parser reads as null, a boolean, or a number that is none of the integers written as such.
_WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}
_INTEGER, _POINT, _POWER = "-?(0|[1-9][0-9]*)", r"\.[0-9]+", r"[eE][+\-]?[0-9]+"
_NUMBER = f"{_INTEGER}({_POINT})?({_POWER})?"
_FRACTION = f"{_INTEGER}({_POINT}({_POWER})?|{_POWER})"
_WRITTEN = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/",
}
_REFERENCES = ("#/$defs/", "#/definitions/")


def literal(text: str) -> str:
    """A Lark string. Control characters are written as escapes, everything else as it is."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0x7F <= ord(c) < 0xA0 else c for c in quoted)


class NotWritable(Exception):
    """A function whose arguments have no form in this dialect that the grammar could hold a model to."""


def writable(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `xml_rules` can hold a model to the schemas of all these ``{"name": …, "parameters": …}``."""
    try:
        xml_rules(tools, lambda pattern: pattern, lambda schema: "")
    except NotWritable:
        return False
    return True


def xml_rules(
    tools: Sequence[Mapping[str, Any]], regex: Callable[[str], str], inlined: Callable[[Any], str]
) -> str:
    """A rule ``call`` for one call, from ``<function=`` to ``</function>``, and all that it needs.

    ``regex`` makes a terminal of a pattern that must match a whole text, ``inlined`` the text of a JSON schema.
    NotWritable when a schema cannot be held to.
    """
    rules = _Rules(regex, inlined)
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        parameters = " ".join(rules.parameters(tool["parameters"]))
        lines.append(
            f"call_{i}: {literal('<function=' + tool['name'] + '>' + chr(10))} {parameters} "
            + literal("</function>")
        )
    return "\n".join([*lines, *rules.terminals()]) + "\n"


class _Rules:
    """The rules of one grammar; texts of the same kind share a terminal."""

    def __init__(self, regex: Callable[[str], str], inlined: Callable[[Any], str]) -> None:
        self._regex = regex
        self._inlined = inlined
        self._named: dict[str, str] = {}
        self._room = _ROOM

    def terminals(self) -> list[str]:
        return [f"{name}: {expression}" for expression, name in self._named.items()]

    def parameters(self, schema: Mapping[str, Any]) -> list[str]:
        unknown = set(schema) - {
            "type",
            "properties",
            "required",
            "additionalProperties",
            "$defs",
            "definitions",
        }
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if unknown or len(properties) > _MAX_PARAMETERS or not set(required) <= set(properties):
            raise NotWritable
        if not properties and others is not False:
            raise NotWritable  # names of the model's own could come twice
        values = _Values(schema, self)
        found = []
        for name, of in properties.items():
            if not _NAME.fullmatch(name):
                raise NotWritable
            if of is False and name not in required:
                continue
            written = f"{literal(f'<parameter={name}>' + chr(10))} {values.value(name, of)}"
            found.append(written if name in required else f"({written})?")
        return found

    def terminal(self, expression: str) -> str:
        return self._named.setdefault(expression, f"V{len(self._named)}")

    def whole(self, pattern: str) -> str:
        return self._regex(pattern)

    def json(self, schema: Any) -> str:
        self._room -= len(json.dumps(schema))
        if self._room < 0:
            raise NotWritable  # another dialect writes the definitions once
        return f'%json {self._inlined(schema)} "\\n</parameter>\\n"'


class _Values:
    """The values of one function's parameters."""

    def __init__(self, root: Mapping[str, Any], rules: _Rules) -> None:
        self._root = root
        self._rules = rules
        self._types = ParameterTypes(root)
        self._left = _LEFT

    def value(self, name: str, schema: Any) -> str:
        """What may stand between a parameter's tags, the closing one included."""
        if schema is True or schema == {}:
            return self._lexeme(self._rules.terminal(_FREE))
        if not isinstance(schema, Mapping):
            raise NotWritable
        kinds = self._types.kinds(name)
        if kinds is None:
            raise NotWritable
        if "string" not in kinds:
            return self._rules.json(self._with_definitions(schema))
        members = list(self._members(schema, 0))
        if all(set(member) == {"type"} for member in members):
            return self._lexeme(self._plain(kinds, members))
        read_as = [word for kind in kinds for word in _WORDS.get(kind, ())]
        numeric = "number" in kinds
        parts = [self._part(name, member, read_as, numeric) for member in members]
        return self._lexeme(self._rules.terminal(" | ".join(part for part in parts if part) or _refuse()))

    def _lexeme(self, terminal: str) -> str:
        return self._rules.terminal(f"{terminal} {_END}")

    def _plain(self, kinds: frozenset[str], members: Sequence[Mapping[str, Any]]) -> str:
        """Types only: whatever is read as one of them is valid, and the rest is text."""
        named = {kind for member in members for kind in _types_of(member)}
        free = _FREE
        if "integer" in named and "number" not in named:
            free += f" & ~/{_BLANK}{_FRACTION}{_BLANK}/"
        return self._rules.terminal(free)

    def _members(self, schema: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
        """The alternatives of a schema, without references, each of them with keywords of its own only."""
        self._left -= 1
        if depth > 16 or self._left < 0:
            raise NotWritable
        for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
            if keyword not in schema:
                continue
            if len(schema) > 1:
                raise NotWritable
            inner = schema[keyword]
            if keyword == "$ref":
                inner = [self._types.at(inner)]
            elif keyword == "allOf" and len(inner) > 1:
                raise NotWritable
            if not all(isinstance(member, Mapping) for member in inner):
                raise NotWritable
            found = [each for member in inner for each in self._members(member, depth + 1)]
            if keyword == "oneOf" and len({kind for m in found for kind in _types_of(m)}) < len(found):
                raise NotWritable  # what matches two of them matches none
            return found
        return [schema]

    def _part(
        self, name: str, schema: Mapping[str, Any], read_as: Sequence[str], numeric: bool
    ) -> str | None:
        """A terminal's expression for one alternative; None where no text can be read as a value of it."""
        if set(schema) <= {"type", "enum", "const"} and set(schema) & {"enum", "const"}:
            return self._listed(name, schema)
        if set(schema) == {"type"} and isinstance(schema["type"], str) and schema["type"] in _WRITTEN:
            return f"({_WRITTEN[schema['type']]})"
        if schema.get("type") != "string":
            raise NotWritable
        expression = _FREE
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            if most != "" and most < least:
                return None
            expression += f" & /(?s:.{{{least},{most}}})/"
        if "pattern" in schema:
            expression += f" & {self._rules.whole(_whole_pattern(schema['pattern']))}"
        if set(schema) - {"type", "minLength", "maxLength", "pattern"}:
            raise NotWritable
        if read_as:
            expression += f" & ~/{_BLANK}({'|'.join(read_as)}){_BLANK}/"
        if numeric:
            expression += f" & ~/{_BLANK}{_NUMBER}{_BLANK}/"
        return self._rules.terminal(expression)

    def _listed(self, name: str, schema: Mapping[str, Any]) -> str | None:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            raise NotWritable
        kinds = _types_of(schema) if "type" in schema else None
        found = []
        for value in values:
            if kinds is not None and not _is_of(value, kinds):
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            again = json.loads(self._types.as_json(name, text))
            if again == value and type(again) is type(value) and "</parameter>" not in text:
                found.append(literal(text))
        return f"({' | '.join(dict.fromkeys(found))})" if found else None

    def _with_definitions(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameter's schema on its own, with what it may refer to."""
        known = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        if not all(reference.startswith(_REFERENCES) for reference in _references([schema, known])):
            raise NotWritable
        if set(known) & set(schema):
            raise NotWritable
        return {**schema, **known}


def _refuse() -> str:
    raise NotWritable


def _types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(named)
    raise NotWritable


def _is_of(value: Any, kinds: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in kinds
        case bool():
            return "boolean" in kinds
        case int():
            return bool(kinds & {"integer", "number"})
        case float():
            return "number" in kinds or ("integer" in kinds and value.is_integer())
        case str():
            return "string" in kinds
        case list():
            return "array" in kinds
        case _:
            return "object" in kinds


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [each for member in schema for each in _references(member)]
    if not isinstance(schema, Mapping):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [each for member in schema.values() for each in _references(member)]


def _whole_pattern(pattern: str) -> str:
    """A pattern that must be found in a text, as one that the whole text matches.

    Anchors are understood at both ends of a pattern without alternatives beside them; NotWritable elsewhere.
    """
    inside, depth, in_class, plain, at = "", 0, 0, True, 0
    begins = pattern.startswith("^")
    body = pattern[1:] if begins else pattern
    ends = False
    while at < len(body):
        character = body[at]
        if character == "\\":
            if body[at + 1 : at + 2] in ("b", "B", "A", "z", "Z", "<", ">", ""):
                raise NotWritable
            inside += body[at : at + 2]
            at += 2
            continue
        if in_class:
            in_class += (character == "[") - (character == "]")
        elif character == "[":
            in_class = 1
            if body[at + 1 : at + 2] == "]" or body[at + 1 : at + 3] == "^]":
                raise NotWritable  # a bracket that begins a class is read differently by different libraries
        elif character == "$" and at == len(body) - 1 and not depth:
            ends = True
            break
        elif character in "^$":
            raise NotWritable
        elif character in "()":
            if body[at : at + 2] == "(?" and body[at : at + 3] != "(?:":
                raise NotWritable
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            plain = False
        inside += character
        at += 1
    if not plain and (begins or ends):
        raise NotWritable
    before, after = ("" if begins else "(?s:.*)"), ("" if ends else "(?s:.*)")
    return f"{before}(?:{inside}){after}"
