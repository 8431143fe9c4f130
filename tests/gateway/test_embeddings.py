"""Embeddings and ranking over an engine whose vectors a test can work out."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from openai import AsyncOpenAI

from toque.errors import UnavailableError
from toque.routing.base import OnRoute
from toque.routing.fake import FakeEngineClient
from toque.types import EngineRequest, FinishReason, SequenceOutput

from .world import Plan, World, served, soon, world

SIZE = 4


def vector_of(ids: tuple[int, ...]) -> list[float]:
    """Not of length 1, so that whoever normalizes shows."""
    return [float(len(ids)), float(sum(ids) % 7), float(ids[0]), -0.5]


@dataclass
class Vectors(FakeEngineClient):
    """One vector for each request."""

    delay_s: float = 0.0
    most: int = 0

    async def generate(
        self, request: EngineRequest, on_route: OnRoute | None = None
    ) -> AsyncGenerator[SequenceOutput, None]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            if request.prompt[-1] == ord("!"):
                raise UnavailableError("the replica is gone")
            if request.prompt[-1] == ord("~"):
                yield SequenceOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.ERROR,
                    error="too late",
                    error_code="deadline_exceeded",
                )
            data = struct.pack(f"<{SIZE}f", *vector_of(request.prompt))
            yield SequenceOutput(request.request_id, [], finish_reason=FinishReason.STOP, embedding=data)
        finally:
            self.running -= 1


def give_vectors(w: World, **fields: Any) -> Vectors:
    engine = Vectors(**fields)
    w.deployment.client = w.deployment.current.client = engine
    w.deployment.current.card = replace(w.deployment.current.card, embedding_size=SIZE)
    return engine


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with world(Plan(context=40)) as made:
        give_vectors(made)
        yield made


async def post(w: World, path: str = "/v1/embeddings", **fields: Any) -> Any:
    return await w.client.post(path, json={"model": "parrot", **fields})


def ids_of(text: str) -> tuple[int, ...]:
    return (256, *text.encode())


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [ids_of("hi")]),
        (["hi"], [ids_of("hi")]),
        (["b", "a", "b"], [ids_of("b"), ids_of("a"), ids_of("b")]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ("", [(256,)]),  # the beginning-of-text token is a text too
    ],
)
async def test_texts_and_ids_become_vectors_in_order(
    w: World, given: Any, ids: list[tuple[int, ...]]
) -> None:
    """Field case BR-065."""
    answer = (await post(w, input=given)).json()
    assert answer["object"] == "list"
    assert answer["model"] == "parrot"
    assert [item["index"] for item in answer["data"]] == list(range(len(ids)))
    assert [item["embedding"] for item in answer["data"]] == [vector_of(text) for text in ids]
    tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_is_the_same_vector_as_little_endian_float32(w: World) -> None:
    floats = (await post(w, input=[1, 2])).json()["data"][0]["embedding"]
    for field in ({"encoding_format": "float"}, {"encoding_format": None}, {}):
        assert (await post(w, input=[1, 2], **field)).json()["data"][0]["embedding"] == floats
    text = (await post(w, input=[1, 2], encoding_format="base64")).json()["data"][0]["embedding"]
    assert base64.b64decode(text) == struct.pack("<4f", *floats)
    assert base64.b64encode(struct.pack("<4f", 1, -0.5, 0, 2)) == b"AACAPwAAAL8AAAAAAAAAQA=="


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, None])
async def test_dimensions_keep_the_first_numbers_and_the_length(w: World, dimensions: int | None) -> None:
    got = (await post(w, input=[1, 2], dimensions=dimensions)).json()["data"][0]["embedding"]
    whole = vector_of((1, 2))
    if dimensions in (None, SIZE):
        assert got == whole
    else:
        kept = whole[:dimensions]
        assert got == pytest.approx([x / math.hypot(*kept) for x in kept], abs=1e-6)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input[0]", {"input": [[]]}),
    ("input", {"input": ["a"] * 2049}),
    ("input", {"input": [258]}),
    ("input[1]", {"input": [[1], [258]]}),
    ("input", {"input": [-1]}),
    ("input[1]", {"input": ["a", 1]}),
    ("input[1]", {"input": ["a", None]}),
    ("input", {"input": 7}),
    ("input", {"input": {"text": "a"}}),
    ("input", {"input": "x" * 40}),
    ("input[1]", {"input": ["a", "x" * 40]}),
    ("input", {"input": list(range(41))}),
    ("input", {}),
    *[("dimensions", {"input": "a", "dimensions": value}) for value in (0, -1, 5, 10**6, 10**400, 1.5, "2", True)],
    *[("encoding_format", {"input": "a", "encoding_format": value}) for value in ("hex", "", 7)],
    *[("timeout", {"input": "a", "timeout": value}) for value in (-1, 0, 86_401, 10**9, "1", True)],
    *[("priority", {"input": "a", "priority": value}) for value in (-1001, 1001, "1")],
    ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), BAD, ids=range(len(BAD)))
async def test_what_cannot_be_embedded_is_refused_by_name(
    w: World, param: str, fields: dict[str, Any]
) -> None:
    answer = await post(w, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 500
    assert not w.deployment.client.requests  # type: ignore[attr-defined]
    assert w.deployment.admission.requests == 0


async def test_a_full_batch_comes_back_in_order_with_a_bounded_number_at_once(w: World) -> None:
    engine = give_vectors(w, delay_s=0.001)
    answer = await post(w, input=[[i % 200, i // 200] for i in range(2048)])
    vectors = [item["embedding"] for item in answer.json()["data"]]
    assert vectors == [vector_of((i % 200, i // 200)) for i in range(2048)]
    assert engine.most <= 128
    assert w.deployment.admission.requests == 0


async def test_one_failure_fails_the_request_and_stops_the_others(w: World) -> None:
    engine = give_vectors(w, delay_s=0.01)
    answer = await post(w, input=["a!"] + ["b"] * 300)
    assert answer.status_code == 503
    assert engine.running == 0
    assert len(engine.requests) < 300
    assert (await post(w, input="a~")).status_code == 504
    assert (await post(w, input="a")).status_code == 200


async def test_a_deadline_ends_the_work() -> None:
    async with world() as w:
        engine = give_vectors(w, delay_s=5)
        assert (await post(w, input="a", timeout=0.05)).status_code == 504
        assert engine.running == 0


async def test_models_do_what_they_were_made_for(parrot: World) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = (await post(parrot, path, **fields)).json()["error"]
        assert (error["code"], error["param"]) == ("model_not_supported", "model")
        assert "generates text" in error["message"]
        assert (await post(parrot, path, **{**fields, "model": "none"})).status_code == 404
    give_vectors(parrot)
    for answer in (await parrot.chat(), await parrot.complete()):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "model_not_supported"
        assert "makes embeddings" in answer.json()["error"]["message"]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


async def test_documents_are_ranked_by_the_cosine_with_the_query(w: World) -> None:
    documents = ["zebra", "hello", {"text": "hell"}, "hello", "a"]
    texts = ["zebra", "hello", "hell", "hello", "a"]
    answer = (await post(w, "/v1/rerank", query="hello", documents=documents, return_documents=True)).json()
    scores = [cosine(vector_of(ids_of("hello")), vector_of(ids_of(text))) for text in texts]
    order = sorted(range(5), key=lambda i: (-scores[i], i))
    assert [result["index"] for result in answer["results"]] == order
    assert order.index(3) == order.index(1) + 1, "equal documents stay in their order"
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-6)
        assert result["document"] == {"text": texts[result["index"]]}
    assert answer["method"] == "embedding"
    assert answer["usage"]["total_tokens"] == sum(len(ids_of(text)) for text in ["hello", *texts])
    few = (await post(w, "/v1/rerank", query="hello", documents=documents, top_n=2)).json()
    assert [result["index"] for result in few["results"]] == order[:2]
    assert "document" not in few["results"][0]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("documents", {"documents": []}),
        ("documents", {"documents": ["a"] * 1025}),
        ("documents[0]", {"documents": [7]}),
        ("documents[0].text", {"documents": [{}]}),
        ("documents[1]", {"documents": ["a", "x" * 40]}),
        ("query", {"query": "x" * 40}),
        ("query", {"query": ["a"]}),
        ("top_n", {"top_n": 0}),
        ("top_n", {"top_n": "1"}),
        ("rank_fields", {"rank_fields": ["title"]}),
        ("max_chunks_per_doc", {"max_chunks_per_doc": 3}),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(w: World, param: str, fields: dict[str, Any]) -> None:
    answer = await post(w, "/v1/rerank", **{"query": "q", "documents": ["a"], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_tokens_are_charged_and_counted(w: World) -> None:
    async with world(Plan(flags={"limits.tokens_per_minute": 100})) as limited:
        give_vectors(limited)
        answer = await post(limited, input=[[1] * 30, [2] * 30])
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert (await post(limited, input=[[1] * 200] * 2)).status_code == 429
        text = (await limited.client.get("/metrics")).text
        assert 'toque_prompt_tokens_total{model="parrot"} 60.0' in text


async def test_leaving_stops_the_work() -> None:
    async with served() as w:
        engine = give_vectors(w, delay_s=120)
        task = asyncio.create_task(post(w, input=["a"] * 10))
        await soon(lambda: engine.running == 10)
        task.cancel()
        await soon(lambda: engine.running == 0)


async def test_the_official_client_gets_the_same_vectors_either_way() -> None:
    """It asks for base64 by itself, and decodes it."""
    async with served() as w, AsyncOpenAI(base_url=f"{w.url}/v1", api_key="k", max_retries=0) as client:
        give_vectors(w)
        for fields in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model="parrot", input=["a", "b"], **fields)  # type: ignore[arg-type]
            assert [item.embedding for item in answer.data] == [vector_of(ids_of(text)) for text in "ab"]
            assert answer.usage.total_tokens == 4
