"""Structured answers and forced calls through the whole line: a model that would say something else obeys."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from openai.lib.streaming.chat import ChatCompletionStreamState

from .server import Server

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "颜色": {"enum": ["red", "blue"]},
        "n": {"type": "integer", "minimum": 3, "maximum": 250},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["颜色", "n"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}},
    },
]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_followed_streamed_or_not(server: Server, temperature: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    with server.client() as client:
        for seed in range(4):
            fields: Any = {
                "temperature": temperature,
                "seed": seed,
                "response_format": form,
                "max_tokens": 300,
            }
            whole = client.chat.completions.create(model="parrot", messages=USER, **fields).choices[0]
            assert Draft202012Validator(SCHEMA).is_valid(json.loads(whole.message.content or "")), whole
            assert whole.finish_reason == "stop"
            stream = client.chat.completions.create(model="parrot", messages=USER, stream=True, **fields)
            text = "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
            assert text == whole.message.content


def test_other_structures(server: Server) -> None:
    with server.client() as client:

        def answer(**structure: object) -> str:
            body = {"structured_outputs": structure}
            made = client.completions.create(model="parrot", prompt="go\n", max_tokens=40, extra_body=body)
            return made.choices[0].text

        assert answer(choice=["yes", "no"]) in ("yes", "no")
        assert set(answer(regex="[xy]{2,5}")) <= {"x", "y"}
        assert answer(grammar='start: "sum " /[0-9]/').startswith("sum ")
        with pytest.raises(openai.BadRequestError, match="regex"):
            answer(regex="(a|b")
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            answer(json={"type": "array", "uniqueItems": True})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_forced_calls_have_valid_arguments(server: Server, choice: Any) -> None:
    with server.client() as client:
        for seed in range(3):
            fields: Any = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            fields["max_tokens"] = 400
            whole = client.chat.completions.create(model="parrot", messages=USER, **fields).choices[0]
            state: Any = ChatCompletionStreamState()
            for chunk in client.chat.completions.create(model="parrot", messages=USER, stream=True, **fields):
                state.handle_chunk(chunk)
            streamed = state.current_completion_snapshot.choices[0]
            for made in (whole, streamed):
                assert made.finish_reason == "tool_calls"
                (call,) = made.message.tool_calls
                arguments = json.loads(call.function.arguments)
                if call.function.name == "paint":
                    assert Draft202012Validator(SCHEMA).is_valid(arguments)
                else:
                    assert (choice, arguments) == ("required", {})
            assert (
                streamed.message.tool_calls[0].function.arguments
                == whole.message.tool_calls[0].function.arguments
            )
