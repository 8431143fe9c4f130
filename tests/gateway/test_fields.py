"""Every field that OpenAI documents is honoured, refused or ignored, as its declaration says."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from toque.gateway.http.fields import Handling, declared
from toque.gateway.http.openai_types import (
    ChatCompletionBody,
    CompletionBody,
    ContentPart,
    Message,
    StreamOptions,
)
from toque.text.grammar.spec import GrammarSpec

from .world import EOS, FIRST_PIECE, Plan, World, spoken, world

PATHS: dict[type[msgspec.Struct], str] = {
    ChatCompletionBody: "/v1/chat/completions",
    CompletionBody: "/v1/completions",
}
ODD: tuple[Any, ...] = (7, "x", {"a": 1}, [1], True)


def body(kind: type[msgspec.Struct], **fields: Any) -> dict[str, Any]:
    content = (
        {"prompt": "hi"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return {"model": "parrot", **content, **fields}


@pytest.mark.parametrize(
    ("kind", "official"),
    [
        (ChatCompletionBody, chat_params.CompletionCreateParamsBase),
        (CompletionBody, completion_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_client_is_declared(kind: type[msgspec.Struct], official: type) -> None:
    ours = {field.name for field in declared(kind)}
    assert not set(get_type_hints(official)) - ours
    assert "stream" in ours


def fields_with(handling: Handling) -> list[tuple[type[msgspec.Struct], str]]:
    return [
        (kind, field.name)
        for kind in PATHS
        for field in declared(kind)
        if field.handling is handling and field.type is msgspec.Raw
    ]


@pytest.mark.parametrize(("kind", "name"), fields_with(Handling.REFUSED))
async def test_refused_fields_are_named(parrot: World, kind: type[msgspec.Struct], name: str) -> None:
    answer = await parrot.client.post(PATHS[kind], json=body(kind, **{name: {"a": 1}}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert not parrot.engine.requests
    for nothing in (None, False, [], {}, "", "none"):
        answer = await parrot.client.post(PATHS[kind], json=body(kind, **{name: nothing}))
        assert answer.status_code == 200, (name, nothing)


@pytest.mark.parametrize(("kind", "name"), fields_with(Handling.IGNORED))
async def test_ignored_fields_change_nothing(parrot: World, kind: type[msgspec.Struct], name: str) -> None:
    plain = await parrot.client.post(PATHS[kind], json=body(kind))
    for value in ODD:
        answer = await parrot.client.post(PATHS[kind], json=body(kind, **{name: value}))
        assert answer.status_code == 200, (name, value)
        assert answer.json()["choices"] == plain.json()["choices"]
    first, *others = [request.sampling for request in parrot.engine.requests]
    assert all(sampling == first for sampling in others)


def test_nested_types_are_declared_too() -> None:
    for kind in (Message, ContentPart, StreamOptions):
        assert declared(kind)


async def test_a_message_from_an_answer_may_be_sent_back_as_it_is(parrot: World) -> None:
    """What the official client's ``model_dump()`` of an answer's message holds."""
    answered = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None}  # fmt: skip
    messages = [
        {"role": "user", "content": "q"},
        answered,
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    assert (await parrot.chat(messages=messages)).status_code == 200
    prompt = bytes(token for token in parrot.engine.requests[0].prompt if token < 256)
    assert b"assistant: no" in prompt


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "video_url"}, "video"),
        ({"type": "text"}, "text is required"),
        ({"type": "thing"}, "type text"),
    ],
)
async def test_parts_that_are_no_text_are_refused_by_name(
    parrot: World, part: dict[str, Any], word: str
) -> None:
    answer = await parrot.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert word in error["message"]
    assert error["param"].startswith("messages[0].content[1].")


async def test_bad_words_are_banned_at_a_text_s_start_and_after_a_space() -> None:
    async with world(Plan(script=spoken("ok"), pieces=[b" x"])) as w:
        tokenizer: Any = w.deployment.current.tokenizer
        plain = tokenizer.encode
        tokenizer.encode = lambda text, *, add_special: (
            [FIRST_PIECE] if text == " x" else plain(text, add_special=add_special)
        )
        answer = await w.complete(bad_words=["x"], logit_bias={"120": 5, "7": 1})
        assert answer.status_code == 200
        assert dict(w.engine.requests[0].sampling.logit_bias) == {120: -100.0, 7: 1.0, FIRST_PIECE: -100.0}
        await w.complete(bad_words=["y"])  # " y" is two tokens, the second of them banned already
        assert dict(w.engine.requests[1].sampling.logit_bias) == {121: -100.0}
        for words in ([""], ["x"] * 129, ["x" * 257], "x", [7]):
            answer = await w.complete(bad_words=words)
            assert answer.status_code == 400, words
            assert answer.json()["error"]["param"].startswith("bad_words")


async def test_bad_words_of_several_tokens_are_texts_that_the_answer_does_not_contain(parrot: World) -> None:
    await parrot.complete(bad_words=["long", "y", "日本"], n=2)
    for request in parrot.engine.requests:
        assert request.grammar is not None
        assert GrammarSpec.decode(request.grammar) == GrammarSpec.without(["long", "日本"])
        assert (121, -100.0) in request.sampling.logit_bias
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}):
        answer = await parrot.chat(bad_words=["long"], **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "bad_words"


async def test_special_tokens_may_be_left_out_of_a_prompt(parrot: World) -> None:
    await parrot.complete(prompt="ab", add_special_tokens=False)
    assert parrot.engine.requests[0].prompt == (97, 98)


async def test_a_request_brings_its_deadline_in_the_body_or_a_header() -> None:
    async with world(Plan(script=spoken("ok", first_delay_s=5))) as w:
        for body_s, header in ((0.05, None), (None, "0.05"), (60, "0.05"), (0.05, "60")):
            headers = {} if header is None else {"x-request-timeout": header}
            answer = await w.client.post(
                "/v1/completions", json=body(CompletionBody, timeout=body_s), headers=headers
            )
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        for header in ("soon", "0", "-1", "nan", "inf", "1e9", "86401"):
            answer = await w.client.post(
                "/v1/completions", json=body(CompletionBody), headers={"x-request-timeout": header}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "x-request-timeout"


async def test_cached_tokens_are_reported() -> None:
    async with world(Plan(script=spoken("ok", cached_tokens=2))) as w:
        for answer in (await w.chat(), await w.complete()):
            usage = answer.json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_up_to_sixteen_stops(parrot: World) -> None:
    assert (await parrot.chat(stop=[str(i) * 3 for i in range(16)])).status_code == 200
    answer = await parrot.chat(stop=[str(i) * 3 for i in range(17)])
    assert answer.json()["error"]["param"] == "stop"
    assert EOS in parrot.engine.requests[0].sampling.stop_token_ids
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
