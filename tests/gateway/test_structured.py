"""response_format and structured_outputs: what reaches the engine, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from toque.errors import GrammarError
from toque.routing.base import OnRoute
from toque.routing.fake import FakeEngineClient
from toque.text.grammar.spec import GrammarKind, GrammarSpec
from toque.types import EngineRequest, FinishReason, SequenceOutput

from .world import World

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarSpec.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, GrammarSpec.json_schema({"type": "null"})),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec.lark('start: "a"')),
    ],
)
async def test_the_engine_gets_the_grammar(parrot: World, fields: Any, expected: GrammarSpec | None) -> None:
    for ask in (parrot.chat, parrot.complete):
        answer = await ask(**fields)
        assert answer.status_code == 200, answer.text
        grammar = parrot.engine.requests[-1].grammar
        assert (None if grammar is None else GrammarSpec.decode(grammar)) == expected


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
        ),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        (
            "structured_outputs",
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        ),
        ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.json", {"structured_outputs": {"json": {"if": {}}}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "x" * 70_000}}),
    ],
)
async def test_what_cannot_be_enforced_is_refused(parrot: World, param: str, fields: dict[str, Any]) -> None:
    for ask in (parrot.chat, parrot.complete):
        answer = await ask(**fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert not parrot.engine.requests


class Refusing(FakeEngineClient):
    """As an engine whose compiler refuses the grammar."""

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        yield SequenceOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            error="it is no grammar",
            error_code=GrammarError.code,
        )


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"type": "null"}}}),
    ("structured_outputs.json_object", {"structured_outputs": {"json_object": True}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"]}}),
    ("bad_words", {"bad_words": ["several words"]}),
    (
        "tools",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ),
]


async def test_a_grammar_that_the_engine_refuses_is_the_callers_fault(parrot: World) -> None:
    parrot.deployment.client = parrot.deployment.current.client = Refusing()
    for stream in (False, True):
        answer = await parrot.chat(structured_outputs={"regex": "(a"}, stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (GrammarError.code, "invalid_request_error")
        assert error["message"] == "it is no grammar"
        assert error["param"] == "structured_outputs.regex"
    for param, fields in FORMS:
        error = (await parrot.chat(**fields)).json()["error"]
        assert error["param"] == param


def test_kinds_are_all_reachable() -> None:
    assert {kind.value for kind in GrammarKind} == {
        "json_object",
        "json_schema",
        "regex",
        "choice",
        "lark",
        "tools",
        "without",  # by bad_words
    }
