"""Grammars as text for the library: Lark, with JSON schemas inlined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toque.text.grammar.spec import GrammarKind, GrammarSpec

# Between two tokens of JSON: enough for a line break and an indentation, never so much that an answer is nothing else.
WHITESPACE = r"[ \t\r\n]{1,8}"
_AROUND = "/[ \\t\\r\\n]{0,8}/"


def lark_source(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """The whole grammar. ``special``: ids of the control tokens that a tool dialect may write, by text."""
    match spec.kind:
        case GrammarKind.LARK:
            body = str(spec.value)
            if not spec.think:
                return body
            raise ValueError("a grammar of the caller's own cannot follow reasoning")
        case GrammarKind.JSON_OBJECT:
            rules = f"answer: LEAD %json {_schema({'type': 'object'})}\nLEAD: {_AROUND}\n"
        case GrammarKind.JSON_SCHEMA:
            rules = f"answer: LEAD %json {_schema(spec.value)}\nLEAD: {_AROUND}\n"
        case GrammarKind.REGEX:
            rules = f"answer: PATTERN\nPATTERN: {_regex(str(spec.value))}\n"
        case GrammarKind.CHOICE:
            rules = "answer: " + " | ".join(_literal(choice) for choice in spec.value) + "\n"
        case GrammarKind.TOOLS:
            rules = _tools(spec.value, special)
    if not spec.think:
        return f"start: answer\n{rules}"
    return f"start: thought answer\nthought[lazy]: /(?s:.*)/ {_literal(spec.think)}\n{rules}"


def _tools(value: Mapping[str, Any], special: Mapping[str, int]) -> str:
    dialect, tools = value["dialect"], value["tools"]
    if dialect == "mistral":
        opened = f"<[{special['[TOOL_CALLS]']}]>" if "[TOOL_CALLS]" in special else '"[TOOL_CALLS]"'
        more = ' ("," " "? call)*' if value["parallel"] else ""
        rules = f'answer: {opened} " "? "[" call{more} "]"\n'
        return rules + _calls(tools, '"{\\"name\\": " {name} ", \\"arguments\\": " {json} "}"')
    if dialect in ("hermes", "gemma"):
        before, after = ("<tool_call>\n", "\n</tool_call>")
        more = ' ("\\n" call)*' if value["parallel"] else ""
        form = f'{_literal(before)} "{{\\"name\\": " {{name}} ", \\"arguments\\": " {{json}} "}}" {_literal(after)}'
        return f"answer: call{more}\n" + _calls(tools, form)
    more = ' ("; " call)*' if value["parallel"] else ""
    return f"answer: call{more}\n" + _calls(tools, '"{\\"name\\": " {name} ", \\"parameters\\": " {json} "}"')


def _calls(tools: Sequence[Mapping[str, Any]], form: str) -> str:
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        name = _literal(json.dumps(tool["name"], ensure_ascii=False))
        parameters = {"type": "object", **tool["parameters"]}
        line = form.replace("{name}", name).replace("{json}", f"%json {_schema(parameters)}")
        lines.append(f"call_{i}: {line}")
    return "\n".join(lines) + "\n"


def _schema(schema: Any) -> str:
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps({**options, **schema}, ensure_ascii=False)


def _literal(text: str) -> str:
    """A Lark string. Control characters are written as escapes, everything else as it is."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0x7F <= ord(c) < 0xA0 else c for c in quoted)


def _regex(pattern: str) -> str:
    """The pattern between slashes. It must match the whole answer, so outer anchors are left out."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2 == 1:
        inner = inner[:-1]
    escaped, backslash = [], False
    for character in inner:
        if character == "/" and not backslash:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if backslash else "\\n")
        else:
            escaped.append(character)
        backslash = character == "\\" and not backslash
    return "/" + "".join(escaped) + "/"
