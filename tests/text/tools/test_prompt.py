"""Tools for templates that know nothing of them."""

from __future__ import annotations

from typing import Any

from toque.text.tools.choose import tool_parser
from toque.text.tools.prompt import template_knows_tools, told_in_words

from .folding import fold, options

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}


def test_tools_stand_in_the_system_message_or_before_the_users_first_words() -> None:
    for dialect, sign in (("hermes", "<tool_call>"), ("gemma", "```tool_code")):
        chat: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
        told = told_in_words(chat, TOOLS, dialect)
        assert told[0]["content"].startswith("Be brief.\n\n")
        assert "get_weather" in told[0]["content"]
        assert sign in told[0]["content"]
        assert told[1] == chat[1]
        told = told_in_words(chat[1:], TOOLS, dialect)
        assert "get_weather" in told[0]["content"]
        assert told[0]["content"].endswith("\n\nHi")
        assert chat[1]["content"] == "Hi", "the caller's messages are not touched"


def test_earlier_calls_and_results_become_text() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    _, call, result = told_in_words(chat, TOOLS, "hermes")
    assert (
        call["content"]
        == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    )
    assert "tool_calls" not in call
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}


def test_earlier_calls_are_told_in_the_dialect_that_is_read() -> None:
    call: dict[str, Any] = {
        "function": {"name": "f", "arguments": {"a": "x\ny", "b": {"c": None}, "d": 2}},
        "id": "1",
        "type": "function",
    }
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Do."},
        {"role": "assistant", "tool_calls": [call]},
    ]
    told, answer = told_in_words(chat, TOOLS, "qwen3-coder")
    assert "<parameter=" in told["content"]
    schemas = {"f": {"properties": {"a": {"type": "string"}}}}
    (_, arguments), *rest = fold(
        lambda: tool_parser("qwen3-coder", options(schemas=schemas)), [answer["content"]]
    ).values
    assert (arguments, rest) == (call["function"]["arguments"], [])


def test_templates_that_know_tools() -> None:
    assert template_knows_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert not template_knows_tools("{% for m in messages %}{{ m.content }}{% endfor %}")
