"""Grammars as text for the library: Lark, with JSON schemas inlined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toque.text.grammar.spec import GrammarKind, GrammarSpec
from toque.text.grammar.xml_calls import literal, xml_rules

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
            rules = "answer: " + " | ".join(literal(choice) for choice in spec.value) + "\n"
        case GrammarKind.WITHOUT:
            banned = "|".join("".join(map(_plain, text)) for text in spec.value)
            rules = f"answer: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({banned})(?s:.*)/\n"
        case GrammarKind.TOOLS:
            rules = _tools(spec.value, special)
    if not spec.think:
        return f"start: answer\n{rules}"
    return f"start: thought answer\nthought[lazy]: /(?s:.*)/ {literal(spec.think)}\n{rules}"


def _tools(value: Mapping[str, Any], special: Mapping[str, int]) -> str:
    """Calls only; or calls, or JSON; or any text in which a call that begins must go on as one."""
    dialect, parallel = value["dialect"], value["parallel"]
    if dialect in ("hermes", "qwen3-coder"):
        inner = '"\\n" call "\\n</tool_call>"'
        calls = '"<tool_call>" ' + inner + (' ("\\n<tool_call>" ' + inner + ")*" if parallel else "")
        begun, rest = r"/(?s:.*)<tool_call>/", "/\\n?/ call /\\n?<\\/tool_call>/"
    elif dialect == "mistral":
        tag = special.get("[TOOL_CALLS]")
        opening = f"<[{tag}]>" if tag is not None else '"[TOOL_CALLS]"'
        rest = '/ ?/ "[" call ' + ('("," / ?/ call)* ' if parallel else "") + '"]"'
        calls = f"{opening} {rest}"
        begun = r"/(?s:.*)\[TOOL_CALLS\]/" if tag is None else ""
    else:
        calls = "call" + (' ("; " call)*' if parallel else "")
        begun = rest = ""
    if dialect == "qwen3-coder":
        forms = xml_rules(value["tools"], _regex, _schema)
    else:
        forms = _calls(value["tools"], "parameters" if dialect == "llama3" else "arguments")
    if not value["free"]:
        rules = f"answer: calls\ncalls: {calls}\n{forms}"
        if value["otherwise"] is None:
            return rules
        other = f"LEAD %json {_schema(value['otherwise'])}\nLEAD: {_AROUND}\n"
        return rules.replace("answer: calls", "answer: calls | other", 1) + "other: " + other
    if begun:
        many = "*" if parallel else "?"
        return f"answer: (begun {rest}){many} TEXT\nbegun[lazy]: {begun}\nTEXT: /(?s:.*)/\n{forms}"
    if dialect == "mistral":
        return f"answer: TEXT (calls TEXT)?\ncalls: {calls}\nTEXT: /(?s:.*)/\n{forms}"
    # Nothing but the brace at the beginning tells a call.
    return f"answer: calls | TEXT\ncalls: {calls}\nTEXT: /([^{{](?s:.*))?/\n{forms}"


def _calls(tools: Sequence[Mapping[str, Any]], arguments: str) -> str:
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = literal(f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{arguments}": ')
        schema = _schema({"type": "object", **tool["parameters"]})
        lines.append(f'call_{i}: {head} %json {schema} "}}"')
    return "\n".join(lines) + "\n"


def _schema(schema: Any) -> str:
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps({**options, **schema}, ensure_ascii=False)


def _plain(character: str) -> str:
    """A character of a regular expression that means itself."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _regex(pattern: str) -> str:
    """The pattern between slashes. It must match the whole answer, so outer anchors are left out.

    ``\\d`` is 0 to 9, as in JSON schemas: the library's would be the digits of all scripts, of a newer Unicode than
    that of whoever reads the answer.
    """
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2 == 1:
        inner = inner[:-1]
    escaped, backslash = [], False
    for character in inner:
        if character == "/" and not backslash:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if backslash else "\\n")
        elif character in "dD" and backslash:
            escaped[-1] = "[0-9]" if character == "d" else "[^0-9]"  # inside a class, too: classes nest
        else:
            escaped.append(character)
        backslash = character == "\\" and not backslash
    return "/" + "".join(escaped) + "/"
