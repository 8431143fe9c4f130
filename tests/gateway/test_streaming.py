"""Streams: their text, their order, their ends; and that the whole answer is their fold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toque.errors import EngineError, QueueFullError, ReplicaDiedError
from toque.routing.fake import Script
from toque.types import EngineRequest, FinishReason

from .world import EOS, FIRST_PIECE, Plan, World, events, spoken, texts, world

PIECES = [b" a", b"\xe6\xad", b"\xaa", b" b", b" ", b" "]


async def test_a_character_in_two_pieces_is_never_split_and_spaces_stay() -> None:
    """Field case BR-001."""
    tokens = [FIRST_PIECE + i for i in range(len(PIECES))]
    async with world(Plan(script=Script([*tokens, EOS]), pieces=PIECES)) as w:
        for ask in (w.chat, w.complete):
            whole = (await ask()).json()["choices"][0]
            text = whole["message"]["content"] if "message" in whole else whole["text"]
            assert text == " a歪 b  "
            answer = await ask(stream=True)
            for line in answer.content.split(b"\n"):
                line.decode("utf-8")
            deltas = texts(events(answer))
            assert "".join(deltas) == text
            assert not any("�" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("options", "shown"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_usage_comes_once_and_only_when_asked_for(parrot: World, options: Any, shown: bool) -> None:
    """Field case BR-004."""
    fields = {} if options is None else {"stream_options": options}
    *chunks, done = events(await parrot.chat(stream=True, **fields))
    assert done == "[DONE]"
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if shown:
        assert with_usage == [chunks[-1]]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["prompt_tokens"] > 0
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


async def test_stream_options_without_a_stream_are_refused(parrot: World) -> None:
    answer = await parrot.chat(stream_options={"include_usage": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


async def test_chunks_of_one_answer_agree_and_the_role_comes_first(parrot: World) -> None:
    *chunks, _ = events(await parrot.chat(stream=True))
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "parrot", "chat.completion.chunk")
    }
    assert isinstance(chunks[0]["created"], int)
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])
    other = events(await parrot.chat(stream=True))
    assert other[0]["id"] != chunks[0]["id"]


def _echo_back(request: EngineRequest) -> Script:
    """Says the prompt's last letter three times, at a pace that mixes the choices up."""
    letter = request.prompt[-1]
    return Script([letter] * 3, delay_s=0.001 * (letter % 3))


async def test_choices_are_numbered_prompt_major_and_each_ends_once() -> None:
    """Field case BR-007."""
    fields = {"prompt": ["aa", "bb", "cc"], "n": 2, "echo": True, "max_tokens": 3}
    expected = ["aaaaa", "aaaaa", "bbbbb", "bbbbb", "ccccc", "ccccc"]
    async with world(Plan(script=_echo_back)) as w:
        whole = (await w.complete(**fields)).json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert whole["usage"]["prompt_tokens"] == 9  # each prompt once, with its beginning-of-text token
        assert whole["usage"]["completion_tokens"] == 18
        stream = events(await w.complete(stream=True, **fields))
        assert ["".join(texts(stream, index)) for index in range(6)] == expected
        ends = [c["index"] for e in stream[:-1] for c in e["choices"] if c["finish_reason"] == "length"]
        assert sorted(ends) == list(range(6))


async def test_seeded_choices_differ_and_repeat(parrot: World) -> None:
    for _ in range(2):
        assert (await parrot.complete(n=3, seed=42)).status_code == 200
    seeds = [request.sampling.seed for request in parrot.engine.requests]
    assert seeds[0] == 42
    assert len(set(seeds[:3])) == 3
    assert sorted(seeds[:3], key=str) == sorted(seeds[3:], key=str)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_no_part_of_a_stop_string_is_shown(endpoint: str) -> None:
    """Field case BR-008."""
    said = "one two three four five six seven"
    async with world(Plan(script=spoken(said))) as w:
        ask = getattr(w, endpoint)
        stream = events(await ask(stream=True, stop="five six", max_tokens=100))
        assert "".join(texts(stream)) == "one two three four "
        shown = ""
        for text in texts(stream):
            shown += text
            assert "one two three four ".startswith(shown)
        reasons = [c["finish_reason"] for e in stream[:-1] for c in e["choices"] if c["finish_reason"]]
        assert reasons == ["stop"]
        assert w.engine.aborted, "the engine went on after the stop string"
        whole = (await ask(stop=["five six", "never"], max_tokens=100)).json()["choices"][0]
        assert (whole.get("text") or whole["message"]["content"]) == "one two three four "
        assert whole["finish_reason"] == "stop"


async def test_a_stop_string_that_never_comes_delays_nothing() -> None:
    said = "one two three"
    async with world(Plan(script=spoken(said))) as w:
        stream = events(await w.chat(stream=True, stop="x" * 40))
        chunks = texts(stream)
        assert chunks[0] == ""  # the role's
        assert chunks[1:] == list(said)


async def test_several_tokens_of_one_step_travel_together() -> None:
    async with world(Plan(script=spoken("abcdefgh", per_step=4))) as w:
        stream = events(await w.chat(stream=True))
        assert texts(stream) == ["", "abcd", "efgh"]


async def test_what_fails_before_the_first_token_has_its_own_status() -> None:
    error = QueueFullError("the queue of the replica is full", retry_after_s=7.2)
    async with world(Plan(script=Script(error=error))) as w:
        for stream in (False, True):
            answer = await w.chat(stream=stream)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "8"
            assert answer.json()["error"]["code"] == "queue_full"


async def test_what_fails_later_is_the_streams_last_event() -> None:
    error = ReplicaDiedError("the replica went away")
    async with world(Plan(script=spoken("abc", error=error, fail_at=2))) as w:
        answer = await w.chat(stream=True)
        stream = events(answer)
        assert answer.status_code == 200
        assert texts(stream[:-1]) == ["", "a", "b"]
        assert stream[-1]["error"]["code"] == "replica_died"
        assert b"[DONE]" not in answer.content
        whole = await w.chat()
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "replica_died"
        assert await w.alive()


async def test_one_choice_that_fails_ends_the_request_and_frees_the_others() -> None:
    def script(request: EngineRequest) -> Script:
        if request.request_id.endswith("-1"):
            return Script(error=EngineError("no"), first_delay_s=0.01)
        return Script(b"abc", hold=True)

    async with world(Plan(script=script)) as w:
        answer = await w.complete(n=3, max_tokens=100)
        assert answer.status_code == 500
        assert len(w.engine.aborted) == 2
        assert w.engine.running == 0
        assert w.deployment.admission.requests == w.deployment.admission.tokens == 0


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_an_answer_that_the_engine_gives_up_is_an_error(parrot: World, reason: FinishReason) -> None:
    parrot.engine.script = Script([], finish=reason)
    answer = await parrot.chat()
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


async def test_every_chunk_is_strict_json_on_one_line(parrot: World) -> None:
    parrot.engine.script = spoken('quote " backslash \\ newline \n tab \t nul \0 line sep \u2028 é 🙂')
    answer = await parrot.chat(stream=True)
    for block in answer.content.split(b"\n\n")[:-1]:
        assert b"\n" not in block
        if block != b"data: [DONE]":
            json.loads(block.removeprefix(b"data: "))
    assert (
        "".join(texts(events(answer))) == 'quote " backslash \\ newline \n tab \t nul \0 line sep \u2028 é 🙂'
    )
