"""The official client against a real server: what its users see."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from toque.errors import QueueFullError, ReplicaDiedError
from toque.routing.fake import Script

from .world import Plan, World, served, soon, spoken

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with served(Plan(script=spoken("hello there"), flags={"auth.api_keys": ["k"]})) as made:
        yield made


@pytest.fixture
async def client(w: World) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{w.url}/v1", api_key="k", max_retries=0) as made:
        yield made


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="parrot", messages=USER, n=2, seed=1, stop=["zz"])  # type: ignore[arg-type]
    assert [choice.message.content for choice in answer.choices] == ["hello there", "hello there"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id is not None


async def test_chat_streamed(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="parrot",
        messages=USER,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    text, usage, reasons, logprobs = "", None, [], 0
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            logprobs += len(choice.logprobs.content or []) if choice.logprobs else 0
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == "hello there"
    assert reasons == ["stop"]
    assert logprobs == len(text)
    assert usage is not None
    assert usage.completion_tokens == 12


async def test_chat_stream_helper_folds_to_the_whole_answer(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="parrot", messages=USER) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_completion()
    whole = await client.chat.completions.create(model="parrot", messages=USER)  # type: ignore[arg-type]
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="parrot", prompt=["a", "b"], max_tokens=5, logprobs=1, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["ahello", "bhello"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2, 3, 4, 5]
    text = ""
    async for chunk in await client.completions.create(model="parrot", prompt="a", max_tokens=5, stream=True):
        text += chunk.choices[0].text
    assert text == "hello"


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["parrot"]
    assert (await client.models.retrieve("parrot")).owned_by == "toque"


async def test_errors_are_the_clients_own_classes(client: AsyncOpenAI, w: World) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="parrot", messages=USER, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="none", messages=USER)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    w.engine.script = spoken("ab", error=QueueFullError("full"))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="parrot", messages=USER)  # type: ignore[arg-type]
    w.engine.script = spoken("ab", error=ReplicaDiedError("gone"), fail_at=1)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="parrot", messages=USER)  # type: ignore[arg-type]
    stream = await client.chat.completions.create(model="parrot", messages=USER, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass


async def test_leaving_a_stream_stops_the_work(client: AsyncOpenAI, w: World) -> None:
    w.engine.script = Script(b"a" * 400, delay_s=0.02, hold=True)
    stream = await client.chat.completions.create(model="parrot", messages=USER, stream=True)  # type: ignore[arg-type]
    async for _ in stream:
        break
    await stream.close()
    await soon(lambda: w.engine.running == 0)  # it would hold for ever


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ran_out_of_time_is_not_sent_again(client: AsyncOpenAI, w: World, stream: bool) -> None:
    """The client would send a 504 again, and have the same work done for as long."""
    w.engine.script = spoken("ab", first_delay_s=5)
    eager = client.with_options(max_retries=1)
    late = {"x-request-timeout": "0.05"}
    with pytest.raises(openai.InternalServerError) as slow:
        await eager.completions.create(model="parrot", prompt="a", stream=stream, extra_headers=late)
    assert slow.value.status_code == 504
    assert slow.value.code == "deadline_exceeded"
    assert len(w.engine.requests) == 1
    w.engine.script = spoken("ab", error=ReplicaDiedError("gone"))  # what is worth another try gets it
    with pytest.raises(openai.InternalServerError):
        await eager.completions.create(model="parrot", prompt="a")
    assert len(w.engine.requests) == 3
