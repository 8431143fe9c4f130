"""OpenAI messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toque.errors import TemplateError

Message = dict[str, Any]

MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names in use for a message's reasoning


@dataclass(frozen=True, slots=True)
class Habits:
    """What one template wants: see `CompiledTemplate.habits`."""

    content_parts: bool = False  # a list of content parts is walked by the template itself
    content_none: bool = False  # it asks whether content is none, so an absent content must be there as none
    arguments_text: bool = False  # tool-call arguments as JSON text rather than a dictionary


def plain_data(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON types only. What else a caller passes becomes a harmless word, as Hugging Face does."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise TemplateError(f"messages are nested deeper than {MAX_DEPTH} levels", param="messages")
    if isinstance(value, Mapping):
        return {plain_data(key, depth + 1): plain_data(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(entry, depth + 1) for entry in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return f"<{type(value).__name__}>"


def normal_messages(messages: Sequence[Mapping[str, Any]], habits: Habits) -> list[Message]:
    """Copies of the messages in the form that the template wants.

    Keys without a value are left out, an absent content is empty text (or none, where the template asks for that),
    text parts are joined with newlines unless the template walks over them, and tool-call arguments are a dictionary
    unless the template wants JSON text. Raises TemplateError for what is no message or no JSON object of arguments.
    """
    chat: list[Message] = []
    for index, given in enumerate(messages):
        if not isinstance(given, Mapping):
            raise TemplateError(f"messages[{index}] must be an object", param=f"messages[{index}]")
        message: Message = {key: value for key, value in plain_data(given).items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if "content" not in message:
            message["content"] = None if habits.content_none else ""
        elif isinstance(message["content"], list) and not habits.content_parts:
            message["content"] = _joined(message["content"], index)
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], index, habits)
        chat.append(message)
    return chat


def _joined(parts: list[Any], index: int) -> str:
    texts = []
    for number, part in enumerate(parts):
        where = f"messages[{index}].content[{number}]"
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(f"{where}: this model takes text only, not {str(kind)[:40]}", param=where)
    return "\n".join(texts)


def _tool_calls(calls: Any, index: int, habits: Habits) -> Any:
    if not isinstance(calls, list):
        raise TemplateError(
            f"messages[{index}].tool_calls must be a list", param=f"messages[{index}].tool_calls"
        )
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        where = f"messages[{index}].tool_calls[{number}]"
        if not isinstance(function, dict):
            raise TemplateError(f"{where} must be an object with a function", param=where)
        arguments = _arguments(function.get("arguments"), where + ".function.arguments")
        if habits.arguments_text:
            given = function.get("arguments")
            text = given if isinstance(given, str) and given.strip() else None
            function["arguments"] = text if text is not None else json.dumps(arguments, ensure_ascii=False)
        else:
            function["arguments"] = arguments
    return calls


def _arguments(given: Any, where: str) -> dict[str, Any]:
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{where} is not valid JSON", param=where) from error
    if not isinstance(given, dict):
        raise TemplateError(f"{where} must be a JSON object, got {type(given).__name__}", param=where)
    return given
