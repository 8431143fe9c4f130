"""The scripted client behaves like an engine: what tests in front of it rely on."""

from __future__ import annotations

import asyncio

import pytest

from toque.errors import EngineError, UnavailableError
from toque.routing.base import ReplicaState
from toque.routing.fake import FakeEngineClient, Script
from toque.types import EngineRequest, FinishReason, SamplingParams, SequenceOutput


def request(name: str = "r", **sampling: object) -> EngineRequest:
    return EngineRequest(name, (1, 2, 3), SamplingParams(**sampling))  # type: ignore[arg-type]


async def collect(client: FakeEngineClient, asked: EngineRequest) -> list[SequenceOutput]:
    return [output async for output in client.generate(asked)]


async def test_plays_its_tokens_and_finishes() -> None:
    client = FakeEngineClient(Script(tokens=[5, 6, 7], cached_tokens=2))
    outputs = await collect(client, request())
    assert [o.tokens for o in outputs] == [[5], [6], [7]]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.STOP]
    assert [o.cached_tokens for o in outputs] == [2, 0, 0]
    assert client.finished == ["r"]
    assert client.running == 0


@pytest.mark.parametrize(("max_tokens", "expected"), [(0, []), (1, [5]), (2, [5, 6])])
async def test_stops_at_max_tokens(max_tokens: int, expected: list[int]) -> None:
    outputs = await collect(FakeEngineClient(Script(tokens=[5, 6, 7])), request(max_tokens=max_tokens))
    assert [t for o in outputs for t in o.tokens] == expected
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_stops_at_a_stop_id_but_not_before_min_tokens() -> None:
    client = FakeEngineClient(Script(tokens=[9, 5, 9, 6], per_step=3))
    outputs = await collect(client, request(stop_token_ids=(9,), min_tokens=2))
    assert [t for o in outputs for t in o.tokens] == [9, 5, 9]
    assert outputs[-1].stop_token == 9


async def test_logprobs_cover_every_token() -> None:
    outputs = await collect(FakeEngineClient(Script(tokens=[5, 6])), request(logprobs=2, prompt_logprobs=0))
    assert [len(o.logprobs or ()) for o in outputs] == [1, 1]
    assert outputs[0].logprobs is not None
    assert outputs[0].logprobs[0].top == ((5, -1.0), (6, -2.0))
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == 3


@pytest.mark.parametrize("fail_at", [0, 1, 2])
async def test_fails_where_the_script_says(fail_at: int) -> None:
    client = FakeEngineClient(Script(tokens=[5, 6], error=EngineError("boom"), fail_at=fail_at))
    got: list[int] = []

    async def read() -> None:
        async for output in client.generate(request()):
            got.extend(output.tokens)

    with pytest.raises(EngineError, match="boom"):
        await read()
    assert got == [5, 6][:fail_at]


async def test_closing_the_iterator_aborts() -> None:
    client = FakeEngineClient(Script(tokens=[5], hold=True))
    stream = client.generate(request())
    assert (await anext(stream)).tokens == [5]
    assert client.running == 1
    await stream.aclose()
    assert client.aborted == ["r"]
    assert client.running == 0


async def test_more_than_max_sequences_wait_in_order() -> None:
    client = FakeEngineClient(Script(tokens=[5, 6], delay_s=0.01), max_sequences=1)
    tasks = [asyncio.create_task(collect(client, request(str(i)))) for i in range(3)]
    await asyncio.sleep(0.005)
    assert (client.running, client.waiting) == (1, 2)
    await asyncio.gather(*tasks)
    assert client.finished == ["0", "1", "2"]


async def test_starts_nothing_while_not_ready() -> None:
    client = FakeEngineClient(state=ReplicaState.STARTING, reason="loading")
    with pytest.raises(UnavailableError, match="loading"):
        await collect(client, request())
    assert client.requests == []
