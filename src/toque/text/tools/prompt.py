"""Tools for models whose chat template knows nothing of them: told in words, in the conversation itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_JSON = (
    "You can call these functions:\n\n{functions}\n\n"
    "To call one, write nothing but this, on lines of its own, once for each call:\n"
    '<tool_call>\n{{"name": "<name>", "arguments": {{<arguments as JSON>}}}}\n</tool_call>\n'
    "The results come back in the next message. Answer without a call when you need none."
)
_XML = (
    "You can call these functions:\n\n{functions}\n\n"
    "To call one, write nothing but this, on lines of its own, once for each call:\n"
    "<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>\n"
    "The results come back in the next message. Answer without a call when you need none."
)
_PYTHON = (
    "You can call these functions:\n\n{functions}\n\n"
    "To call some, write nothing but a block of Python that calls them with named arguments:\n"
    '```tool_code\nname(argument="value")\n```\n'
    "The results come back in the next message. Answer without a block when you need none."
)


def template_knows_tools(source: str) -> bool:
    return "tools" in source


def told_in_words(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], dialect: str
) -> list[dict[str, Any]]:
    """The conversation with the functions described at its beginning, and earlier calls and results as text."""
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = {"gemma": _PYTHON, "qwen3-coder": _XML}.get(dialect, _JSON).format(functions=functions)
    plain = [_plain(message, dialect) for message in messages]
    if plain and plain[0].get("role") == "system":
        plain[0]["content"] = f"{plain[0].get('content') or ''}\n\n{told}".lstrip()
        return plain
    # A system message would be refused by some templates, and merged into the user's by others: so here.
    for message in plain:
        if message.get("role") == "user":
            message["content"] = f"{told}\n\n{message.get('content') or ''}"
            break
    return plain


def _plain(message: Message, dialect: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>",
        }
    if message.get("tool_calls"):
        spell = _as_xml if dialect == "qwen3-coder" else _as_json
        calls = [f"<tool_call>\n{spell(_function(call))}\n</tool_call>" for call in message["tool_calls"]]
        plain["content"] = "\n".join([*filter(None, [message.get("content")]), *calls])
    return plain


def _as_json(function: Mapping[str, Any]) -> str:
    return json.dumps(function, ensure_ascii=False)


def _as_xml(function: Mapping[str, Any]) -> str:
    """As Qwen 3 Coder writes a call: texts bare, other values as JSON."""
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):
        return _as_json(function)
    values = {key: value if isinstance(value, str) else _as_json(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={function['name']}>\n{parameters}</function>"


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": function.get("arguments")}
